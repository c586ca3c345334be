"""What FlashAttention-2 changed, for `bench --cases v1v2`: the Ampere forward as it is, with each
change undone alone, and with all three undone."""

from dataclasses import asdict
from typing import Any

from cute_attn import tuning_v1
from cute_attn.config import AmpereConfig
from cute_attn.config_v1 import V1Config
from cute_attn.tools import peers
from cute_attn.tools.cases import Case, parse_config
from cute_attn.tools.peers import Call, Implementation

CASE_SET = "v1v2"
# label -> the fields of V1Config that are True
UNDONE: dict[str, tuple[str, ...]] = {
    "divide": ("divide_always",),
    "split": ("split_keys",),
    "walk": ("walk_rows",),
    "v1": ("divide_always", "split_keys", "walk_rows"),
}
NAMES = ("v2", *UNDONE)


def changes(name: str) -> dict[str, bool]:
    """Fields of V1Config."""
    return {field: field in UNDONE[name] for field in UNDONE["v1"]}


def undone(label: str, text: str = "") -> Implementation:
    """text: fields that replace those of tuning_v1's config, as in --config."""
    flags = changes(label.partition("#")[0])

    def config_of(case: Case) -> AmpereConfig:
        picked = tuning_v1.pick(case.problem(), peers.ampere_chip(), **flags)
        return parse_config(text, picked)

    def prepare(case: Case, q: Any, k: Any, v: Any) -> Call:
        import cute_attn

        config = config_of(case)
        return lambda: cute_attn.fwd(q, k, v, causal=case.causal, config=config, arch="sm80")

    def to_output(result: Any) -> Any:
        return result

    return Implementation(label, prepare, to_output, config=lambda case: asdict(config_of(case)))


def chosen(names: list[str], configs: list[str], which: str, arch: str) -> list[Implementation]:
    """As peers.chosen, which names the others. Raises ValueError for what is not known."""
    if which != "fwd" or arch != "sm80":
        raise ValueError(f"{', '.join(NAMES)}: they are forwards with --arch sm80")
    found: list[Implementation] = []
    for name in names:
        texts = configs or [""]
        labels = [f"{name}#{n}" for n in range(1, len(texts) + 1)] if len(texts) > 1 else [name]
        if name in UNDONE:
            for label, text in zip(labels, texts, strict=True):
                parse_config(text, V1Config())  # raises for a wrong key before anything runs
                found.append(undone(label, text))
        elif name == "v2":
            found.append(peers.ours(name, arch=arch))
        else:
            found += peers.chosen([name], configs, which, arch)
    return found
