"""The public functions: what users call, in the order in which a call is answered."""

from typing import TYPE_CHECKING, Any, Literal, overload

import torch

from cute_attn import autograd, launch, tuning
from cute_attn import backward as gradients
from cute_attn import compile as jit
from cute_attn.backward import BwdExplanation
from cute_attn.config import AmpereBwdConfig, AmpereConfig, BwdConfig, FwdConfig
from cute_attn.explanation import Explanation as Explanation
from cute_attn.explanation import explained
from cute_attn.problem import DTYPES, Problem

if TYPE_CHECKING:
    from torch import Tensor

    from cute_attn.quantize import QuantizedQKV

_NO_WINDOW = (None, None)
_NO_FLASH_WINDOW = (-1, -1)  # flash_attn's way to say so
_E4M3 = torch.float8_e4m3fn


def fwd(
    q: "Tensor | QuantizedQKV",
    k: "Tensor | None" = None,
    v: "Tensor | None" = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: "Tensor | None" = None,
    score_mod: Any = None,
    sink: "Tensor | None" = None,
    cu_seqlens_q: "Tensor | None" = None,
    cu_seqlens_k: "Tensor | None" = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: "Tensor | None" = None,
    seqused_k: "Tensor | None" = None,
    q_descale: "Tensor | None" = None,
    k_descale: "Tensor | None" = None,
    v_descale: "Tensor | None" = None,
    preset: str | None = None,
    k_block: int | None = None,
    out: "Tensor | None" = None,
    out_dtype: "torch.dtype | None" = None,
    o_scale: "Tensor | None" = None,
    return_lse: bool = False,
    return_amax: bool = False,
    config: FwdConfig | AmpereConfig | None = None,
    arch: str | None = None,
) -> "Tensor | tuple[Tensor, ...]":
    """Exact attention, softmax(q k^T * softmax_scale) v, in bf16, fp16 or FP8.

    q           (batch, seqlen_q, nheads_q, head_dim)
    k           (batch, seqlen_k, nheads_kv, head_dim), nheads_q a multiple of nheads_kv
    v           (batch, seqlen_k, nheads_kv, head_dim_v); head dims are multiples of 8 up to 256
    causal      query i sees the keys j <= i + seqlen_k - seqlen_q (aligned bottom-right)
    softmax_scale  any number from -1e38 to 1e38, default head_dim**-0.5
    out         (batch, seqlen_q, nheads_q, head_dim_v) in q's dtype, to be written; a contiguous
                tensor, or any whose rows are 16-byte aligned, is written without a copy
    return_lse  also return the fp32 log-sum-exp of the scores, (batch, nheads_q, seqlen_q)
    config      a FwdConfig, for 'sm80' an AmpereConfig, instead of the tuning table's; see explain
    arch        'sm90', 'sm80' (any newer GPU too) or 'cpu'; default what q's device runs

    Scores are held in fp32: beyond 2^24 they do not tell neighbours apart. In bf16, where they rise
    by more than 2^32 along the keys, |v| may be up to 2^80, or any if config has exact_max.
    Any strides will do; what cannot be loaded is copied once. Rows that see no key are 0, LSE -inf.
    Runs in torch's current stream, on the CPU in plain torch; a class of problems compiles once.

    FP8 (head dims multiples of 16): q is a pack of quantize_qkv, alone; or preset='fp8', 'fp8_hp'
    quantises 16-bit tensors as that does by default, and out has their dtype; or q, k, v are
    float8_e4m3fn (v also in 16 bits, as P then), out has out_dtype, default bf16, and with fp32
    q_descale   (1,), (batch, nheads_kv) as in FlashAttention-3, or (batch, nheads_q, seqlen_q)
    k_descale   (1,), (batch, nheads_kv), or (batch, nheads_kv, ceil(seqlen_k / k_block))
    v_descale   (1,), (batch, nheads_kv), or (batch, nheads_kv, head_dim_v)
    k_block     keys that share a factor, a multiple of 16, default 128
    o_scale     fp32 (1,) or (), for out in float8_e4m3fn: O times it is rounded, up to 448
    return_amax  also return, last, the largest finite |O| before that, fp32 (1,)

    Raises ValueError or TypeError; NotImplementedError naming the argument for what is not built
    yet; RuntimeError if it would have to compile during CUDA-graph capture.
    FlashAttention (arXiv 2205.14135, 2307.08691, 2407.08608; FP8: section 3.3 of the last).
    """
    if (
        (window_size is not _NO_WINDOW and _limits(window_size, causal))
        or (softcap is not None and softcap != 0.0)
        or not alibi_slopes is score_mod is sink is cu_seqlens_q is cu_seqlens_k is None
        or not max_seqlen_q is max_seqlen_k is seqused_q is seqused_k is None
    ):
        _reject(locals(), _BUILT_FP8)
    if (
        v is None
        or not preset is q_descale is k_descale is v_descale is k_block is out_dtype is None
        or (return_amax or o_scale is not None or getattr(q, "dtype", None) is _E4M3)
    ):
        from cute_attn import fp8

        call = causal, softmax_scale, out, out_dtype, k_block, config, arch, o_scale, return_amax
        return fp8.fwd(q, k, v, (q_descale, k_descale, v_descale), preset, call, return_lse)
    return launch.forward(q, k, v, causal, softmax_scale, out, return_lse, config, arch)


def bwd(
    dout: "Tensor",
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    out: "Tensor",
    lse: "Tensor",
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    window_size: tuple[int | None, int | None] = _NO_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: "Tensor | None" = None,
    score_mod: Any = None,
    sink: "Tensor | None" = None,
    cu_seqlens_q: "Tensor | None" = None,
    cu_seqlens_k: "Tensor | None" = None,
    max_seqlen_q: int | None = None,
    max_seqlen_k: int | None = None,
    seqused_q: "Tensor | None" = None,
    seqused_k: "Tensor | None" = None,
    q_descale: "Tensor | None" = None,
    k_descale: "Tensor | None" = None,
    v_descale: "Tensor | None" = None,
    dlse: "Tensor | None" = None,
    deterministic: bool = False,
    config: BwdConfig | AmpereBwdConfig | None = None,
    arch: str | None = None,
) -> "tuple[Tensor, Tensor, Tensor]":
    """Gradients of fwd: (dq, dk, dv) from dout, the gradient of out.

    q, k, v, causal, softmax_scale  as they were in fwd
    dout        (batch, seqlen_q, nheads_q, head_dim_v) in q's dtype, any strides, expanded too
    out, lse    what fwd(..., return_lse=True) gave
    dlse        fp32 (batch, nheads_q, seqlen_q): the gradient of lse, default none
    deterministic  the same call gives the same bits. On the CPU it always does; on CUDA tensors dk
                and dv always have them, and dq has where its parts are added up in a fixed order,
                by a kernel of its own that is somewhat slower
    config      a BwdConfig, for 'sm80' an AmpereBwdConfig, instead of the tuning table's; see
                explain. With its deterministic=True it asks for the same. No effect on the CPU
    arch        'sm90', 'sm80' (any newer GPU too) or 'cpu'; default what q's device runs

    dq, dk, dv are fresh, contiguous, and have the shapes and the dtype of q, k and v. Rows that
    see no key have gradients 0 and give none. Memory grows with seqlen, not with its square.
    Non-finite inputs give unspecified values.

    Raises ValueError or TypeError for a wrong call, NotImplementedError naming the argument for
    what is not built yet, double backward included.
    FlashAttention-2 (arXiv 2307.08691), algorithm 2.
    """
    _reject(locals(), _BUILT_BWD)
    return gradients.backward(
        dout, q, k, v, out, lse, causal, softmax_scale, dlse, deterministic, arch, config
    )


def flash_attn_func(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = _NO_FLASH_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: "Tensor | None" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    *,
    preset: str | None = None,
) -> "Tensor | tuple[Tensor, Tensor, None]":
    """Differentiable attention with flash_attn 2's signature; shapes, dtypes and mask as in fwd.

    deterministic  the backward gives the same bits every time; see bwd
    return_attn_probs  return (out, softmax_lse, None); softmax_lse, fp32 (batch, nheads_q,
                seqlen_q), is differentiable here. The third is flash_attn's dropout mask
    preset      'fp8' or 'fp8_hp': the forward as fwd computes it with that preset, the backward as
                without one, from q, k and v as they are

    Gradients come from bwd and exist once: a second derivative raises NotImplementedError. Works
    under torch.compile(fullgraph=True) and activation checkpointing; without gradients it is fwd.

    Raises as fwd does; NotImplementedError also for dropout_p > 0.
    """
    if (
        dropout_p != 0.0
        or window_size is not _NO_FLASH_WINDOW
        or (softcap is not None and softcap != 0.0)
        or alibi_slopes is not None
    ):
        _check_dropout(dropout_p)
        _reject(
            {
                "causal": causal,
                "window_size": window_size,
                "softcap": softcap,
                "alibi_slopes": alibi_slopes,
            }
        )
    if preset is not None:
        from cute_attn import fp8_autograd

        out, lse = fp8_autograd.attention(
            q, k, v, softmax_scale, causal, deterministic, preset, bool(return_attn_probs)
        )
        return (out, lse, None) if return_attn_probs else out
    out, lse = autograd.attention(
        q, k, v, softmax_scale, causal, deterministic, bool(return_attn_probs)
    )
    return (out, lse, None) if return_attn_probs else out


def flash_attn_qkvpacked_func(
    qkv: "Tensor",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = _NO_FLASH_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: "Tensor | None" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> "Tensor | tuple[Tensor, Tensor, None]":
    """flash_attn_func on views of qkv (batch, seqlen, 3, nheads, head_dim); nothing is copied.

    Raises ValueError or TypeError for another shape, else as flash_attn_func.
    """
    q, k, v = _unpacked("qkv", qkv, 3)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def flash_attn_kvpacked_func(
    q: "Tensor",
    kv: "Tensor",
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int | None, int | None] = _NO_FLASH_WINDOW,
    softcap: float = 0.0,
    alibi_slopes: "Tensor | None" = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> "Tensor | tuple[Tensor, Tensor, None]":
    """flash_attn_func on views of kv (batch, seqlen_k, 2, nheads_kv, head_dim); nothing is copied.

    Raises ValueError or TypeError for another shape, else as flash_attn_func.
    """
    k, v = _unpacked("kv", kv, 2)
    return flash_attn_func(
        q,
        k,
        v,
        dropout_p,
        softmax_scale,
        causal,
        window_size,
        softcap,
        alibi_slopes,
        deterministic,
        return_attn_probs,
    )


def merge(
    out_a: "Tensor", lse_a: "Tensor", out_b: "Tensor", lse_b: "Tensor"
) -> "tuple[Tensor, Tensor]":
    """Combine attention over two disjoint sets of keys into attention over both.

    out_a, out_b (..., seqlen, nheads, head_dim_v) in one float dtype, lse_a, lse_b
    (..., nheads, seqlen) in fp32, as fwd(..., return_lse=True) gives them. Returns the merged
    (out, lse); computed in fp32. Where both LSE are -inf, out is 0 and LSE -inf.
    Raises ValueError or TypeError where shapes, dtypes or devices differ.
    """
    from cute_attn import reference

    return reference.merge(out_a, lse_a, out_b, lse_b)


@overload
def explain(
    q: "Tensor | QuantizedQKV",
    k: "Tensor | None" = ...,
    v: "Tensor | None" = ...,
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    config: FwdConfig | AmpereConfig | None = ...,
    arch: str | None = ...,
    backward: Literal[False] = ...,
    **others: Any,
) -> Explanation: ...


@overload
def explain(
    q: "Tensor",
    k: "Tensor",
    v: "Tensor",
    *,
    causal: bool = ...,
    softmax_scale: float | None = ...,
    config: BwdConfig | AmpereBwdConfig | None = ...,
    arch: str | None = ...,
    backward: Literal[True],
    **others: Any,
) -> BwdExplanation: ...


def explain(
    q: Any,
    k: Any = None,
    v: Any = None,
    *,
    causal: bool = False,
    softmax_scale: float | None = None,
    config: Any = None,
    arch: str | None = None,
    backward: bool = False,
    **others: Any,
) -> Explanation | BwdExplanation:
    """What fwd with the same arguments, FP8's included, or bwd if backward, would run, without
    running or compiling it.

    Here arch='sm90' and 'sm80' go with tensors of any device, the meta device included. Raises as
    they do.
    """
    unknown = others.keys() - ((bwd if backward else fwd).__kwdefaults__ or {}).keys()
    if unknown:
        raise TypeError(f"explain() got an unexpected argument {min(unknown)!r}")
    _reject({"causal": causal, **others}, _BUILT_BWD if backward else _BUILT_FP8)
    if backward:
        if softmax_scale is not None:
            launch.checked_scale(softmax_scale)
        deterministic = others.get("deterministic", False)
        return gradients.explain(q, k, v, causal, config, arch, deterministic)
    fp8_given = [others.get(name) for name in _FP8_ONLY]
    given = any(x is not None for x in fp8_given) or others.get("return_amax")
    if v is None or getattr(q, "dtype", None) is _E4M3 or given:
        from cute_attn import fp8

        *descales, preset, k_block, out_dtype, o_scale = fp8_given
        amax = bool(others.get("return_amax"))
        call = causal, softmax_scale, None, out_dtype, k_block, config, arch, o_scale, amax
        found = fp8.choose(q, k, v, tuple(descales), preset, fp8.Options(*call))  # type: ignore[arg-type]
        device = getattr(q, "device", None) or q.q.device
        given = found.problem, found.config, found.arch, device, found.copies
        return explained(*given, found.quantise)
    negative = softmax_scale is not None and launch.checked_scale(softmax_scale) < 0
    foreign = arch in ("sm80", "sm90")
    plan = launch.make_plan(q, k, v, causal, negative, config, arch, foreign=foreign)
    copies = tuple(name for name, t in (("q", q), ("k", k), ("v", v)) if launch.needs_copy(t))
    return explained(plan.problem, plan.config, plan.target, plan.device, copies)


def warmup(
    head_dim: int,
    head_dim_v: int | None = None,
    *,
    dtype: Any = "bf16",
    causal: bool = False,
    softmax_scale: float | None = None,
    config: FwdConfig | AmpereConfig | BwdConfig | AmpereBwdConfig | None = None,
    arch: str | None = None,
    backward: bool = False,
    deterministic: bool = False,
    preset: str | None = None,
) -> None:
    """Compile, or load from disk, the kernels of a class of problems, so that fwd need not,
    and bwd neither if backward.

    A class is a dtype ('bf16', 'fp16' or the torch dtype), head dims, causal and the sign of
    softmax_scale. One kernel serves all batch sizes, lengths, head counts and strides, and a second
    one few queries on many keys; with config, the backward's if backward, only the kernel of that
    one is made ready. deterministic, with backward, takes the kernel of bwd(deterministic=True)
    instead of the default's. With preset the forward is that of fwd(preset=) and its packs, by
    config if it is an Fp8Config, behind what quantises. Needs no GPU if arch is given: the cache
    directory then serves machines with the same CPU features and DSL. On a GPU of that arch the
    kernel also becomes ready for CUDA-graph capture.
    Raises ValueError or TypeError for a class or config that cannot be, ImportError without the
    DSL.
    """
    import torch

    here = torch.cuda.is_available()
    if arch is None:
        if not here:
            raise ValueError("arch is None and there is no GPU to take it from: name one, 'sm90'")
        arch = launch.choose_arch(torch.device("cuda", torch.cuda.current_device()), None)
    launch.check_arch_name(arch)
    if preset is not None:
        launch.refuse_ampere(arch, "FP8")
    here = here and launch.runs_here(arch)
    target = launch.compile_target(torch.device("cuda" if here else "cpu"), arch)
    negative = softmax_scale is not None and launch.checked_scale(softmax_scale) < 0
    name = DTYPES.get(str(dtype), str(dtype))
    width = head_dim if head_dim_v is None else head_dim_v
    problem = Problem(name, head_dim, width, causal, negative)
    jobs: list[tuple[Problem, jit.AnyConfig]] = []
    if preset is not None:
        from cute_attn import fp8

        jobs += fp8.kernels_of_preset(problem, preset, None if backward else config)
    elif config is None or not backward:
        jobs.append((problem, launch.choose_config(problem, config, target)))  # type: ignore[arg-type]
    if config is None and preset is None and arch != "sm80":
        jobs.append((problem, tuning.split(problem)))
    if backward and (config is not None or arch != "cpu"):
        chosen = gradients.choose_config(problem, config, deterministic, target)  # type: ignore[arg-type]
        jobs.append((gradients.kernel_problem(problem), chosen))
    if arch == "cpu":
        return
    for each in jobs:
        jit.get(*each, target)
        if here and not torch.cuda.is_current_stream_capturing():
            _first_launch(problem, each[1], preset, arch)


def _first_launch(problem: Problem, config: Any, preset: str | None, arch: str) -> None:
    """The driver loads a kernel at its first launch, which a graph under capture may not do."""
    import torch

    dtype = {short: getattr(torch, full.split(".")[1]) for full, short in DTYPES.items()}
    q, v = (
        torch.zeros(1, 1, 1, d, dtype=dtype[problem.dtype], device="cuda")
        for d in (problem.head_dim, problem.head_dim_v)
    )
    scale = -1.0 if problem.negative_scale else 1.0
    if isinstance(config, BwdConfig | AmpereBwdConfig):
        lse = torch.zeros(1, 1, 1, device="cuda")
        gradients.backward(v, q, q, v, v, lse, problem.causal, scale, arch=arch, config=config)
    elif preset is None:
        launch.forward(q, q, v, problem.causal, scale, config=config, arch=arch)
    elif isinstance(config, FwdConfig):  # what quantises is launched with it
        fwd(q, q, v, causal=problem.causal, softmax_scale=scale, preset=preset, config=config)


# Arguments that later issues build


_BUILT_FWD = ("q", "k", "v", "causal", "softmax_scale", "out", "return_lse", "config", "arch")
_FP8_ONLY = ("q_descale", "k_descale", "v_descale", "preset", "k_block", "out_dtype", "o_scale")
_BUILT_FP8 = (*_BUILT_FWD, *_FP8_ONLY, "return_amax")
_BUILT_BWD = (
    *("dout", "q", "k", "v", "out", "lse", "causal", "softmax_scale", "dlse", "deterministic"),
    *("config", "arch"),
)


def _reject(arguments: dict[str, Any], built: tuple[str, ...] = _BUILT_FWD) -> None:
    """Name the first argument that asks for something not built yet."""
    for name, value in arguments.items():
        if name == "window_size":
            asked = _limits(value, arguments["causal"])
        elif name == "softcap":
            asked = value is not None and value != 0.0
        else:
            asked = name not in built and value is not None
        if asked:
            raise NotImplementedError(f"{name} is not built yet: leave it at its default")


def _limits(window_size: Any, causal: bool) -> bool:
    """Whether a window bound would hide a key that the causal mask does not hide anyway."""
    try:
        left, right = window_size
    except (TypeError, ValueError):
        raise ValueError(
            f"window_size is {window_size!r}: a pair (left, right) is wanted"
        ) from None
    for bound in (left, right):
        if bound is not None and (isinstance(bound, bool) or not isinstance(bound, int)):
            raise TypeError(f"window_size is {window_size!r}: its bounds are int or None")
    unlimited = (None, -1)
    return left not in unlimited or not (right in unlimited or (causal and right >= 0))


def _check_dropout(dropout_p: Any) -> None:
    if isinstance(dropout_p, bool) or not isinstance(dropout_p, int | float):
        raise TypeError(f"dropout_p is {dropout_p!r}: a number is wanted")
    if not 0 <= dropout_p < 1:
        raise ValueError(f"dropout_p is {dropout_p}: allowed is 0, the default")
    if dropout_p > 0:
        raise NotImplementedError(
            f"dropout_p is {dropout_p}: dropout is not built, leave it at its default, 0.0"
        )


def _unpacked(name: str, packed: Any, count: int) -> "tuple[Tensor, ...]":
    """The tensors along dimension 2, as views."""
    if not hasattr(packed, "unbind"):
        raise TypeError(f"{name} is a {type(packed).__name__}: a torch.Tensor is wanted")
    if len(packed.shape) != 5 or packed.shape[2] != count:
        raise ValueError(
            f"{name}.shape is {tuple(packed.shape)}: (batch, seqlen, {count}, nheads, head_dim) "
            "is wanted"
        )
    views: tuple[Tensor, ...] = packed.unbind(2)
    return views
