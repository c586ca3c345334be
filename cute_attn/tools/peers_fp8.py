"""Who is timed in the FP8 forward: this library, FlashAttention-3 and cuDNN, each on e4m3 inputs
quantised beforehand from the same q, k and v, and this library's forward in 16 bits.

Interfaces are those of peers.py. FA3 and cuDNN take one factor for a head or a tensor, so their
inputs are scaled by that and otherwise left as they are; ours come from quantize_qkv.
"""

from dataclasses import asdict
from importlib import import_module
from typing import Any

from cute_attn import tuning_fp8
from cute_attn.config import Fp8Config
from cute_attn.problem import Fp8Problem
from cute_attn.tools.cases import Case, parse_config
from cute_attn.tools.peers import Call, Implementation, Unavailable, _first

E4M3_MAX = 448.0
SIXTEEN_BITS = "bf16"  # ours, whose errors those of FP8 are not measured by


def config_for(case: Case, preset: str, text: str = "") -> Fp8Config:
    v_dtype = "e4m3" if preset == "fp8" else case.dtype
    problem = Fp8Problem(**asdict(case), v_dtype=v_dtype, v_shift=True)
    return parse_config(text, tuning_fp8.pick(problem))


def ours(preset: str, label: str = "ours", text: str = "") -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        pack = cute_attn.quantize_qkv(q, k, v, preset=preset)
        config = config_for(case, preset, text) if text not in ("", "pick") else None
        return lambda: cute_attn.fwd(pack, causal=case.causal, config=config)

    def config(case: Case) -> dict[str, Any]:
        return asdict(config_for(case, preset, text))

    return Implementation(label, prepare, _first, config=config)


def _quantising(preset: str) -> Implementation:
    """Ours from 16-bit tensors: what a training step pays."""

    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        return lambda: cute_attn.fwd(q, k, v, causal=case.causal, preset=preset)

    def config(case: Case) -> dict[str, Any]:
        return asdict(config_for(case, preset))

    return Implementation("quantise+ours", prepare, _first, config=config)


def _sixteen_bits() -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        return lambda: cute_attn.fwd(q, k, v, causal=case.causal)

    return Implementation(SIXTEEN_BITS, prepare, _first)


def scaled(x: Any, dims: tuple[int, ...]) -> tuple[Any, Any]:
    """x (batch, seqlen, heads, width) in e4m3 and the fp32 factor that gives it back, of which the
    dims share one; as large as they may be."""
    import torch

    factor = (x.float().abs().amax(dims, keepdim=True) / E4M3_MAX).clamp(min=1e-30)
    return (x.float() / factor).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn), factor


def _flash_attn_3() -> Implementation:
    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        reasons = []
        for name in ("fa3_fwd_interface", "flash_attn_interface"):
            try:
                call = import_module(name).flash_attn_func
            except Exception as error:  # a peer's import may fail in any way
                reasons.append(f"{name}: {error}")
                continue
            return _with_head_factors(call, case, q, k, v)
        raise Unavailable("; ".join(reasons))

    return Implementation("fa3", prepare, _first)


def _with_head_factors(call: Any, case: Case, q: Any, k: Any, v: Any) -> Call:
    """FA3's factors are (batch, heads_kv), those of q too."""
    batch, seqlen_q, heads_q, head_dim = q.shape
    groups = q.reshape(batch, seqlen_q, case.heads_kv, heads_q // case.heads_kv * head_dim)
    q8, q_factor = scaled(groups, (1, 3))
    q8 = q8.reshape(q.shape)
    (k8, k_factor), (v8, v_factor) = scaled(k, (1, 3)), scaled(v, (1, 3))
    factors = [f[:, 0, :, 0].contiguous() for f in (q_factor, k_factor, v_factor)]
    names = dict(zip(("q_descale", "k_descale", "v_descale"), factors, strict=True))
    return lambda: call(q8, k8, v8, causal=case.causal, **names)


def _cudnn() -> Implementation:
    """Through cuDNN's own front end: torch has no FP8 attention of it. One factor a tensor; out is
    e4m3 too, in units of V's factor here."""

    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import torch

        if case.causal and case.seqlen_q != case.seqlen_k:
            raise Unavailable("the causal mask of cuDNN's FP8 forward is aligned top-left")
        cudnn = import_module("cudnn")
        every = (0, 1, 2, 3)
        (q8, fq), (k8, fk), (v8, fv) = (scaled(t, every) for t in (q, k, v))
        out = torch.empty(*q.shape[:3], v.shape[3], dtype=q8.dtype, device=q.device)
        one = torch.ones_like(fv)
        inputs = [t.transpose(1, 2) for t in (q8, k8, v8)]
        scalars = [fq, fk, fv, one / E4M3_MAX, one * E4M3_MAX, 1 / fv]
        call = _graph(cudnn, case, inputs, scalars, out.transpose(1, 2))
        return lambda: (call(), out, fv)

    def to_output(result: Any) -> Any:
        _, out, factor = result
        return out.float() * factor

    return Implementation("cudnn", prepare, to_output)


def _graph(cudnn: Any, case: Case, inputs: list[Any], scalars: list[Any], out: Any) -> Call:
    """inputs and out (batch, heads, seqlen, width) e4m3; scalars (1, 1, 1, 1) fp32."""
    import torch

    e4m3, fp32 = cudnn.data_type.FP8_E4M3, cudnn.data_type.FLOAT
    handle = cudnn.create_handle()
    cudnn.set_stream(handle=handle, stream=torch.cuda.current_stream().cuda_stream)
    types = {"io_data_type": e4m3, "intermediate_data_type": fp32, "compute_data_type": fp32}
    graph = cudnn.pygraph(handle=handle, **types)

    def described(t: Any, data_type: Any) -> Any:
        return graph.tensor(dim=list(t.shape), stride=list(t.stride()), data_type=data_type)

    operands = [described(t, e4m3) for t in inputs] + [described(t, fp32) for t in scalars]
    names = (
        "q",
        "k",
        "v",
        "descale_q",
        "descale_k",
        "descale_v",
        "descale_s",
        "scale_s",
        "scale_o",
    )
    o, _, *largest = graph.sdpa_fp8(
        **dict(zip(names, operands, strict=True)),
        attn_scale=case.head_dim**-0.5,
        use_causal_mask=case.causal,
        generate_stats=False,
    )
    o.set_output(True).set_dim(list(out.shape)).set_stride(list(out.stride())).set_data_type(e4m3)
    amax = [torch.empty(1, 1, 1, 1, device=out.device) for _ in largest]
    for t in largest:
        t.set_output(True).set_dim([1, 1, 1, 1]).set_stride([1, 1, 1, 1]).set_data_type(fp32)
    graph.validate()
    graph.build_operation_graph()
    graph.create_execution_plans([cudnn.heur_mode.A, cudnn.heur_mode.FALLBACK])
    graph.check_support()
    graph.build_plans()
    pairs = zip([*operands, o, *largest], [*inputs, *scalars, out, *amax], strict=True)
    buffers = dict(pairs)
    workspace = torch.empty(graph.get_workspace_size(), device=out.device, dtype=torch.uint8)
    return lambda: graph.execute(buffers, workspace, handle=handle)


def peers(preset: str) -> dict[str, Implementation]:
    """With fp8_hp, which no other library has, only what it is to be faster than."""
    own = {"bf16": _sixteen_bits(), "quantise+ours": _quantising(preset)}
    others = {"cudnn": _cudnn(), "fa3": _flash_attn_3()}
    return own | others if preset == "fp8" else own


def default(preset: str) -> tuple[str, ...]:
    return ("ours", "cudnn", "fa3") if preset == "fp8" else ("ours", "bf16")


def chosen(names: list[str], configs: list[str], preset: str) -> list[Implementation]:
    """As peers.chosen."""
    known, found = peers(preset), []
    for name in names:
        if name == "ours":
            for n, text in enumerate(configs or [""], 1):
                parse_config(text, Fp8Config())  # raises for a wrong key before anything runs
                found.append(ours(preset, f"ours#{n}" if len(configs) > 1 else "ours", text))
        elif name in known:
            found.append(known[name])
        else:
            raise ValueError(f"--impl {name!r}: allowed with {preset} are ours, {', '.join(known)}")
    return found
