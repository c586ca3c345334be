"""Train a small GPT on bytes of Python's standard library, with torch's SDPA and with cute_attn.

    python scripts/train_tiny_gpt.py                               # what this machine can do
    python scripts/train_tiny_gpt.py --out loss.svg --json training.jsonl
    python scripts/train_tiny_gpt.py --preset fp8 --out loss.svg   # and a third, its forward in FP8
    python scripts/train_tiny_gpt.py --impl cute_attn --steps 1000 # one of them, nothing compared
    python scripts/train_tiny_gpt.py --replot training.jsonl --out loss.svg  # trains nothing

On a Hopper GPU: 25M parameters, 300 steps of 16k tokens. Elsewhere a tiny model on the CPU.

Both start from the same weights and see the same batches, so that their losses differ by roundings
only; training amplifies these, now and then by much. How far they may drift apart is measured: SDPA
trains five times, from the same weights on the same batches, rounding differently: with each of
torch's back ends, then with outputs nudged at random by up to a bf16 rounding. Noise is the largest
gap between the smoothed curves of any two of these runs; cute_attn has to stay within twice the
noise of the first of them, at every step. The exit status is 1 where it does not.

With --preset, cute_attn trains once more, with the forward of flash_attn_func(..., preset=). FP8
rounds more than bf16 does: how far that curve is from SDPA's is shown beside noise, and not judged.

Curves that agree say that nothing is grossly wrong: with the CPU's defaults, halved gradients of K
pass. Errors of single results are what the tests measure.
"""

import argparse
import copy
import hashlib
import math
import sys
import sysconfig
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

sys.path.pop(0)  # scripts/ has a profile.py, as Python has
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

import cute_attn
from cute_attn.tools import demo, records
from cute_attn.tools.progress import Progress

GPU = {"steps": 300, "layers": 8, "width": 512, "heads": 8, "seqlen": 1024, "batch": 16, "lr": 6e-4}
CPU = {"steps": 100, "layers": 2, "width": 64, "heads": 2, "seqlen": 64, "batch": 16, "lr": 1e-3}
IMPLEMENTATIONS = ("sdpa", "cute_attn")
PRESETS = ("fp8", "fp8_hp")
PRESET_RUN = "cute_attn/"  # and the preset: the name of its run
# torch's own ways to attend; the first is SDPA's run, the others measure the noise
BACKENDS = {
    "cuda": (
        SDPBackend.FLASH_ATTENTION,
        SDPBackend.EFFICIENT_ATTENTION,
        SDPBackend.CUDNN_ATTENTION,
    ),
    "cpu": (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH),
}
SDPA_RUNS = 5  # of one pair the gap is a matter of luck: of five runs there are ten pairs
NUDGE = 2.0**-8  # relative: from half to one unit in the last place of bf16
# On the CPU, 12 trainings, each also cut after 8 to 60 steps: the gap was at most 1.6 times noise.
TIMES_NOISE = 2.0
VOCABULARY = 256  # bytes
VALIDATION_PART, VALIDATION_BATCHES = 0.05, 8
Attend = Callable[[Tensor, Tensor, Tensor], Tensor]


# ---- the ways to attend, on (batch, seqlen, heads, head_dim) ---------------------------------


def attend_ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return cute_attn.flash_attn_func(q, k, v, causal=True)


def attend_preset(preset: str) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cute_attn.flash_attn_func(q, k, v, causal=True, preset=preset)

    return attend


def attend_sdpa(backend: SDPBackend) -> Attend:
    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))  # SDPA wants the heads first
        with sdpa_kernel(backend):
            return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)

    return attend


def nudged(attend: Attend) -> Attend:
    """What an implementation that rounds differently could have given."""

    def nudge(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        out = attend(q, k, v)
        part = torch.rand(out.shape, device=out.device) * 2 - 1
        return (out.float() * (1 + NUDGE * part)).to(out.dtype)

    return nudge


def backends_that_run(shape: "Shape", device: str) -> list[SDPBackend]:
    found = []
    for backend in BACKENDS[device]:
        qkv = (
            torch.zeros(1, 8, 1, shape.width // shape.heads, device=device, dtype=torch.bfloat16)
            for _ in range(3)
        )
        try:
            attend_sdpa(backend)(*(t.requires_grad_() for t in qkv)).sum().backward()
            found.append(backend)
        except RuntimeError:  # "No available kernel"
            continue
    return found


# ---- the model ----------------------------------------------------------------------------------


class Shape(NamedTuple):
    layers: int
    width: int
    heads: int
    seqlen: int


class Block(nn.Module):
    """Pre-norm: x + attention(norm(x)), then x + MLP(norm(x))."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        width, self.heads = shape.width, shape.heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.attend: Attend = attend_ours

    def forward(self, x: Tensor) -> Tensor:  # (batch, seqlen, width)
        # three views (batch, seqlen, heads, head_dim), in bf16 under autocast
        q, k, v = self.qkv(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).unbind(2)
        x = x + self.proj(self.attend(q, k, v).flatten(2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bytes = nn.Embedding(VOCABULARY, shape.width)
        self.places = nn.Embedding(shape.seqlen, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        for name, p in self.named_parameters():
            if p.dim() == 2:
                last = name.endswith(("proj.weight", "down.weight"))  # these add to the residual
                nn.init.normal_(p, std=0.02 / (2 * shape.layers) ** 0.5 if last else 0.02)
            elif name.endswith("bias"):
                nn.init.zeros_(p)

    def forward(self, tokens: Tensor) -> Tensor:
        """Loss of predicting each byte from those before it; tokens (batch, seqlen + 1)."""
        x, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.bytes(x) + self.places.weight
        for block in self.blocks:
            x = block(x)
        logits = self.head(self.norm(x)).float()  # (batch, seqlen, 256)
        return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


# ---- the text -----------------------------------------------------------------------------------


def load_text(path: str | None) -> bytes:
    """That file's bytes, or the modules of the standard library, in the order of their names."""
    if path:
        return Path(path).read_bytes()
    folder = Path(sysconfig.get_path("stdlib"))
    return b"\n".join(p.read_bytes() for p in sorted(folder.glob("*.py")))


class Data(NamedTuple):
    """Batches are drawn once, from the seed: every run sees the same ones."""

    text: Tensor  # uint8
    training: Tensor  # (steps, batch), where the sequences start
    validation: Tensor  # (batches, batch), in the text's last part

    def batch(self, starts: Tensor, seqlen: int) -> Tensor:
        return self.text[starts[:, None] + torch.arange(seqlen + 1, device=starts.device)].long()


def make_data(text: bytes, args: argparse.Namespace, device: str) -> Data:
    length = args.seqlen + 1
    held_out = max(int(len(text) * VALIDATION_PART), length)
    split = len(text) - held_out
    if split < length:
        raise ValueError(
            f"--seqlen is {args.seqlen}: the text has {len(text)} bytes, which do not hold a "
            f"sequence of {length} for training and one for validation; give another --text"
        )
    draw = torch.Generator().manual_seed(args.seed)
    training = torch.randint(split - length + 1, (args.steps, args.batch), generator=draw)
    validation = split + torch.randint(
        held_out - length + 1, (VALIDATION_BATCHES, args.batch), generator=draw
    )
    array = torch.from_numpy(np.frombuffer(text, dtype=np.uint8).copy())
    return Data(*(t.to(device) for t in (array, training, validation)))


# ---- training -----------------------------------------------------------------------------------


@dataclass
class Run:
    name: str
    losses: np.ndarray  # of each step's batch, before the step
    validation: float
    tokens_per_s: float


def learning_rate(step: int, steps: int) -> float:
    """Of the highest: up in a tenth of the steps, then half a cosine down to a tenth."""
    warm = max(steps // 10, 1)
    if step < warm:
        return (step + 1) / warm
    return 0.55 + 0.45 * math.cos(math.pi * (step - warm) / max(steps - warm, 1))


def synchronize(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def train(
    name: str,
    attend: Attend,
    initial: GPT,
    data: Data,
    args: argparse.Namespace,
    show: Callable[[int, str], None] = lambda step, note: None,
) -> Run:
    """One training run from initial's weights, which stay as they are."""
    device = args.device
    torch.compiler.reset()
    model = copy.deepcopy(initial).to(device)
    for block in model.blocks:
        block.attend = attend
        if args.compile:
            block.compile(fullgraph=True)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1, fused=device == "cuda"
    )
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: learning_rate(n, args.steps))
    autocast = torch.autocast(device, dtype=torch.bfloat16)  # the weights stay fp32
    untimed = min(10, args.steps // 4)  # steps that compile kernels and fill caches
    losses, started = [], time.perf_counter()
    for step, starts in enumerate(data.training):
        if step == untimed:
            synchronize(device)
            started = time.perf_counter()
        with autocast:
            loss = model(data.batch(starts, args.seqlen))
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses.append(loss.detach())
        if step % 10 == 9:  # reading a loss waits for the GPU
            show(step + 1, f"{name}: loss {loss.item():.3f}")
    synchronize(device)
    seconds = time.perf_counter() - started
    with torch.no_grad(), autocast:
        found = [model(data.batch(starts, args.seqlen)) for starts in data.validation]
    tokens = (args.steps - untimed) * args.batch * args.seqlen
    curve = torch.stack(losses).cpu().double().numpy()
    return Run(name, curve, torch.stack(found).mean().item(), tokens / seconds)


def plan(args: argparse.Namespace, shape: Shape) -> list[tuple[str, Attend]]:
    """SDPA's run first, then ours, then those that measure the noise, if both are wanted; ours with
    a preset last."""
    runs: list[tuple[str, Attend]] = []
    if "sdpa" in args.impl:
        backends = backends_that_run(shape, args.device)
        if not backends:
            raise ValueError("no back end of torch's SDPA runs here: --impl cute_attn")
        first, *others = backends
        runs.append(("sdpa", attend_sdpa(first)))
        if "cute_attn" in args.impl:
            for backend in others:
                label = backend.name.removesuffix("_ATTENTION").lower()
                runs.append((f"sdpa/{label}", attend_sdpa(backend)))
            for n in range(1, SDPA_RUNS - len(others)):
                runs.append((f"sdpa/nudged {n}", nudged(attend_sdpa(first))))
    if "cute_attn" in args.impl:
        runs.insert(1, ("cute_attn", attend_ours))
    if args.preset:
        runs.append((f"{PRESET_RUN}{args.preset}", attend_preset(args.preset)))
    return runs


def train_all(args: argparse.Namespace, text: bytes) -> list[Run]:
    shape = Shape(args.layers, args.width, args.heads, args.seqlen)
    data = make_data(text, args, args.device)
    runs = plan(args, shape)
    torch.manual_seed(args.seed)
    initial = GPT(shape)
    count = sum(p.numel() for p in initial.parameters())
    where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
    print(
        f"{where}, torch {torch.__version__}: {count / 1e6:.2f}M parameters, {args.layers} layers, "
        f"{args.heads} heads of {args.width // args.heads}, {args.steps} steps of {args.batch} x "
        f"{args.seqlen} tokens, seed {args.seed}\n"
        f"text: {args.text or 'the standard library'}, {len(text)} bytes, "
        f"sha256 {hashlib.sha256(text).hexdigest()[:12]}",
        flush=True,
    )
    found = []
    with Progress(len(runs) * args.steps, "train") as bar:
        for n, (name, attend) in enumerate(runs):
            show = lambda step, note, n=n: bar.at(n * args.steps + step, note)
            found.append(train(name, attend, initial, data, args, show))
            bar.clear()
            print(row(found[-1], smoothing(args.steps)), flush=True)
    return found


# ---- the comparison -----------------------------------------------------------------------------


def smoothing(steps: int) -> int:
    """Steps that a point of a smoothed curve is the mean of."""
    return max(1, min(20, steps // 5))


def smooth(losses: np.ndarray, window: int) -> np.ndarray:
    return np.convolve(losses, np.full(window, 1 / window), "valid")


def gap(a: Run, b: Run) -> float:
    """The largest distance between the smoothed curves; inf if one is not finite."""
    window = smoothing(len(a.losses))
    largest = float(np.abs(smooth(a.losses, window) - smooth(b.losses, window)).max())
    return largest if math.isfinite(largest) else math.inf


@dataclass
class Verdict:
    gap: float  # between ours and SDPA's first run
    noise: float  # the largest between two of SDPA's
    preset_gap: float | None = None  # between ours with a preset and SDPA's first, where it ran

    @property
    def within(self) -> bool:
        return self.gap <= TIMES_NOISE * self.noise and math.isfinite(self.noise)


def compare(runs: list[Run]) -> Verdict | None:
    """None where nothing was to be compared."""
    ours = [r for r in runs if r.name == "cute_attn"]
    theirs = [r for r in runs if r.name.startswith("sdpa")]
    if not ours or len(theirs) < 2:
        return None
    noise = max(gap(a, b) for a, b in combinations(theirs, 2))
    preset = [gap(r, theirs[0]) for r in runs if r.name.startswith(PRESET_RUN)]
    return Verdict(gap(ours[0], theirs[0]), noise, *preset)


def row(run: Run, window: int) -> str:
    return (
        f"{run.name:14} loss {run.losses[0]:.4f} -> {smooth(run.losses, window)[-1]:.4f} (mean of "
        f"{window} steps)  validation {run.validation:.4f}  {run.tokens_per_s:,.0f} tokens/s"
    )


def plot(runs: list[Run], verdict: Verdict | None, title: str, path: Path) -> None:
    """The curves together; below, how far each is from the first."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "cute_attn"  # the same file from the same losses
    from matplotlib import pyplot

    window = smoothing(len(runs[0].losses))
    steps = np.arange(window, len(runs[0].losses) + 1)
    curves = [smooth(r.losses, window) for r in runs]
    figure, axes = pyplot.subplots(
        2, 1, figsize=(7, 5.2), sharex=True, height_ratios=(2, 1), squeeze=True
    )
    for n, (run, curve) in enumerate(zip(runs, curves)):
        ours = run.name.startswith("cute_attn")
        green = "#d95f02" if run.name.startswith(PRESET_RUN) else "#76b900"
        style: dict[str, Any] = {
            "color": green if ours else str(min(0.14 * n, 0.7)),
            "linestyle": "--" if ours else "-",
            "linewidth": 1.8 if ours else 1.2,
            "zorder": 3 if ours else 2,
        }
        timed = ours or n == 0
        label = run.name + (f", {run.tokens_per_s / 1e3:,.0f}k tokens/s" if timed else "")
        axes[0].plot(steps, curve, label=label, **style)
        axes[1].plot(steps, curve - curves[0], **style)
    if verdict:
        limit = TIMES_NOISE * verdict.noise
        axes[1].axhspan(-limit, limit, color="0.93", zorder=0)
    axes[0].set_ylabel(f"training loss, mean of {window} steps")
    axes[1].set_ylabel(f"minus {runs[0].name}'s")
    axes[1].set_xlabel("step; grey: twice the noise between SDPA's runs")
    axes[0].legend(fontsize=8, frameon=False)
    for axis in axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None} if path.suffix == ".svg" else None)


def title_of(training: dict[str, Any], where: str) -> str:
    return (
        f"GPT of {training['layers']} x {training['width']}, seqlen {training['seqlen']}, {where}"
    )


def replot(path: Path, out: Path) -> None:
    made = records.read([path])[-1]
    runs = [
        Run(r["impl"], np.array(r["losses"]), r["validation_loss"], r["tokens_per_s"])
        for r in made["runs"]
    ]
    plot(runs, compare(runs), title_of(made["training"], made["gpu"] or "CPU"), out)


def record(
    argv: list[str], args: argparse.Namespace, runs: list[Run], verdict: Verdict | None
) -> dict[str, Any]:
    window = smoothing(args.steps)
    made = records.environment(args.device, [])
    made["command"] = records.command_line(["python scripts/train_tiny_gpt.py", *argv])
    made["source"] = records.source_digest("fwd_bwd")
    if args.preset:
        made["source_fp8"] = records.source_digest("fwd_fp8")
    names = (*GPU, "seed", "compile", "preset")
    made["training"] = {name: getattr(args, name) for name in names} | {"window": window}
    made["runs"] = [
        {
            "impl": r.name,
            "training_loss": round(float(smooth(r.losses, window)[-1]), 6),
            "validation_loss": round(r.validation, 6),
            "tokens_per_s": round(r.tokens_per_s),
            "losses": [round(float(x), 5) for x in r.losses],
        }
        for r in runs
    ]
    if verdict:
        made |= {"gap": verdict.gap, "noise": verdict.noise, "within_noise": verdict.within}
        if verdict.preset_gap is not None:
            made["preset_gap"] = verdict.preset_gap
    return made


# ---- the command --------------------------------------------------------------------------------


def positive(text: str) -> int:
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is not positive")
    return number


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    for name, what in {
        "steps": "of the optimizer",
        "layers": "transformer blocks",
        "width": "of the residual stream",
        "heads": "width / heads is head_dim",
        "seqlen": "tokens a sequence",
        "batch": "sequences a step",
    }.items():
        text = f"{what} ({GPU[name]} on a Hopper GPU, {CPU[name]} on the CPU)"
        p.add_argument(f"--{name}", type=positive, metavar="N", help=text)
    p.add_argument("--lr", type=float, help=f"highest learning rate ({GPU['lr']}, {CPU['lr']})")
    p.add_argument("--seed", type=int, default=0, help="of weights and batches (%(default)s)")
    p.add_argument("--impl", default="sdpa,cute_attn", help="one or both of %(default)s")
    p.add_argument("--preset", choices=PRESETS, help="cute_attn once more, in FP8")
    p.add_argument("--compile", action="store_true", help="torch.compile each block")
    p.add_argument("--cpu", action="store_true", help="the CPU path on a GPU machine too")
    p.add_argument("--text", metavar="FILE", help="train on this file's bytes")
    p.add_argument("--out", metavar="FILE", help="plot of the curves, .svg or .png")
    p.add_argument("--json", metavar="FILE", help="append the results, a line")
    p.add_argument("--replot", metavar="FILE", help="of --json: plot its last line, train nothing")
    return p


def check(args: argparse.Namespace) -> None:
    """Completes args; raises ValueError, before anything runs, for what cannot be."""
    args.device = "cuda" if demo.kernels_run_here() and not args.cpu else "cpu"
    for name, default in (GPU if args.device == "cuda" else CPU).items():
        if getattr(args, name) is None:
            setattr(args, name, default)
    args.impl = tuple(dict.fromkeys(args.impl.split(",")))
    for name in args.impl:
        if name not in IMPLEMENTATIONS:
            raise ValueError(f"--impl has {name!r}: one or both of {','.join(IMPLEMENTATIONS)}")
    head_dim, rest = divmod(args.width, args.heads)
    if rest:
        raise ValueError(f"--width is {args.width}: no multiple of --heads {args.heads}")
    if head_dim % 8 or head_dim > 256:
        raise ValueError(
            f"--width is {args.width}, --heads {args.heads}: head_dim is then {head_dim}, "
            "and must be a multiple of 8 up to 256"
        )
    if args.preset and head_dim % 16:
        raise ValueError(f"--preset {args.preset}: head_dim is {head_dim}, no multiple of 16")
    if not 0 < args.lr < math.inf:
        raise ValueError(f"--lr is {args.lr}: a positive number is wanted")
    if not -(2**63) <= args.seed < 2**63:
        raise ValueError(f"--seed is {args.seed}: 64 bits have to hold it")
    if args.out and Path(args.out).suffix not in (".svg", ".png"):
        raise ValueError(f"--out is {args.out}: a name ending in .svg or .png is wanted")
    if args.replot and not args.out:
        raise ValueError("--replot needs --out")
    if args.out and find_spec("matplotlib") is None:
        raise ValueError("--out needs matplotlib: pip install -e '.[plot]'")


def main(argv: list[str]) -> int:
    p = parser()
    args = p.parse_args(argv)
    try:
        check(args)
        if args.replot:
            replot(Path(args.replot), Path(args.out))
            return 0
        text = load_text(args.text)
        runs = train_all(args, text)
    except (OSError, ValueError, NotImplementedError) as error:
        p.error(str(error))
    except torch.cuda.OutOfMemoryError:
        p.error(f"the GPU's memory does not hold --batch {args.batch}: take a smaller one")
    verdict = compare(runs)
    if args.json:
        records.append(args.json, [record(argv, args, runs, verdict)])
    if args.out:
        where = torch.cuda.get_device_name() if args.device == "cuda" else "CPU"
        plot(runs, verdict, title_of(vars(args), where), Path(args.out))
    finite = all(np.isfinite(r.losses).all() for r in runs)
    if not verdict:
        return 0 if finite else 1
    if verdict.preset_gap is not None:
        print(f"{args.preset} is off by {verdict.preset_gap:.2e}, not judged")
    print(
        f"largest gap of the smoothed curves {verdict.gap:.2e}; noise between SDPA's runs "
        f"{verdict.noise:.2e}, allowed {TIMES_NOISE:g} times: "
        + ("within noise" if verdict.within else "the curves PART")
    )
    return 0 if verdict.within and finite else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
