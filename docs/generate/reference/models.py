"""docs/reference/models.md, from the tests: which models were seen with which features.

A test says what it shows by a marker, one line:

    @pytest.mark.model_support("multi-head attention", "pool")
    @pytest.mark.model_support("state layers", "pool", refused="... layers with a state ...")

Tests with the marker `e2e` are of real servers; others show parts. `refused`: the message that a user gets.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

from docs.generate.markdown import table
from docs.generate.product import ROOT

HEAD = """# Models and features

Each cell comes from tests. Nothing here was run on a GPU.

| word | meaning |
|---|---|
| seen | Real SGLang servers gave the same tokens as SGLang alone, or did what the feature is for. |
| in parts | Its parts were tested, not the whole. |
| refused | It is refused with the message under the table. |
| (empty) | Not tried. |
"""
FAMILIES: Final = {
    "multi-head attention": "Llama, Qwen2, Qwen3, Mistral and the like; grouped-query attention too",
    "latent attention": "MLA: DeepSeek V3, Kimi K2",
    "sliding windows": "layers with a window apart: gpt-oss, Gemma 4, Llama 4",
    "sparse index": "DSA: DeepSeek V3.2",
    "state layers": "Mamba, GDN: Qwen3-Next",
    "multimodal": "images, video, sound",
    "embedding": "embedding models",
}
FEATURES: Final = (
    *(
        "pool",
        "restart",
        "disaggregated",
        "buffer only",
        "TP",
        "unequal TP",
        "PP",
        "DP",
        "DP attention",
        "direct hand-off",
    ),
    *("speculative decoding", "LoRA", "new weights", "FP8 KV", "MX and FP4 KV", "tenants' salt"),
)
MARKER: Final = "model_support"


class Seen(NamedTuple):
    """One marker."""

    family: str
    feature: str
    is_end_to_end: bool
    refused: str
    where: str


def page() -> str:
    """The whole page. Raises ValueError for a family or a feature that is not listed above."""
    seen = list(all_seen(ROOT / "tests"))
    messages = list(dict.fromkeys(one.refused for one in seen if one.refused))
    used = [feature for feature in FEATURES if any(one.feature == feature for one in seen)]
    rows = [
        (f"{family}: {says}", *(_cell(seen, family, feature, messages) for feature in used))
        for family, says in FAMILIES.items()
        if any(one.family == family for one in seen)
    ]
    listed = "\n".join(f"{number}. `{message}`" for number, message in enumerate(messages, 1))
    return f"{HEAD}\n{table(('family', *used), rows)}\n## Messages\n\n{listed}\n"


def all_seen(tests: Path) -> Iterator[Seen]:
    """What the markers of all tests say, in the order of files. Raises ValueError."""
    for path in sorted(tests.rglob("test_*.py")):
        text = path.read_text(encoding="utf-8")
        if MARKER not in text:
            continue
        tree = ast.parse(text)
        is_end_to_end = any(_name(node) == "pytest.mark.e2e" for node in ast.walk(tree))
        for node in ast.walk(tree):
            if isinstance(node, ast.Call) and _name(node.func) == f"pytest.mark.{MARKER}":
                yield _seen(node, is_end_to_end, f"{path.relative_to(tests)}:{node.lineno}")


def _seen(call: ast.Call, is_end_to_end: bool, where: str) -> Seen:
    try:
        family, feature = (ast.literal_eval(one) for one in call.args)
        more = {str(one.arg): ast.literal_eval(one.value) for one in call.keywords}
        found = Seen(family, feature, is_end_to_end, more.pop("refused", ""), where)
    except ValueError as error:
        raise ValueError(f"{where}: write families, features and messages as plain texts: {error}") from None
    if family not in FAMILIES or feature not in FEATURES or more:
        raise ValueError(f"{where}: {family!r} with {feature!r} is not in docs/generate/reference/models.py")
    return found


def _cell(seen: list[Seen], family: str, feature: str, messages: list[str]) -> str:
    own = [one for one in seen if (one.family, one.feature) == (family, feature)]
    words = []
    if any(one.is_end_to_end and not one.refused for one in own):
        words.append("seen")
    elif any(not one.refused for one in own):
        words.append("in parts")
    numbers = sorted({messages.index(one.refused) + 1 for one in own if one.refused})
    words += [f"refused ({', '.join(map(str, numbers))})"] if numbers else []
    return ", ".join(words)


def _name(node: ast.AST) -> str:
    return ast.unparse(node) if isinstance(node, ast.Attribute) else ""
