"""The self-check sees every place of SGLang that is gone, renamed or no longer used, and names it."""

from __future__ import annotations

import ast
import enum
import importlib
import inspect
import linecache
import textwrap
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import Any, TypeAlias

import pytest

from pdserve.engine.sglang import selfcheck
from pdserve.errors import StartupError
from pdserve.sglang_places import Place, missing_places

Rename: TypeAlias = Callable[[Any, str, str], Any]
PACKAGE = Path(selfcheck.__file__).parent


def modules() -> list[ModuleType]:
    return [importlib.import_module(f"pdserve.engine.sglang.{name}") for name in selfcheck.MODULES]


def all_places() -> list[Place]:
    return [*selfcheck.HASHES, *(place for module in modules() for place in module.PLACES)]


def test_every_module_that_imports_sglang_declares_what_it_leans_on() -> None:
    declared = set(selfcheck.MODULES)
    for path in PACKAGE.rglob("*.py"):
        name = ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        imports = [
            n.module or "" for n in ast.walk(ast.parse(path.read_text())) if isinstance(n, ast.ImportFrom)
        ]
        uses = any(module.startswith("sglang") for module in imports)
        # the CPU hooks have a table and trials of their own; the others only start and check
        if uses and not name.startswith("cpu.") and name not in ("prepare", "selfcheck"):
            assert name in declared, name


def test_the_installed_sglang_fits() -> None:
    assert list(missing_places(all_places())) == []


# --- each place can be missed


def holders(place: Place) -> tuple[list[Any], str]:
    """What holds the attribute, an overridden one too, and the attribute's last name."""
    owner: Any = importlib.import_module(place.module)
    *path, last = place.attribute.split(".")
    for part in path:
        owner = getattr(owner, part)
    classes = (owner if isinstance(owner, type) else type(owner)).__mro__
    return [one for one in (owner, *classes) if last in vars(one)], last


@pytest.mark.extended
def test_each_place_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for place in all_places():
        if place.attribute.endswith("__init__"):  # every class has one
            continue
        owners, last = holders(place)
        with monkeypatch.context() as gone:
            if isinstance(owners[0], enum.EnumType):  # its members cannot be taken out
                gone.setattr(importlib.import_module(place.module), owners[0].__name__, object())
            else:
                for owner in dict.fromkeys(owners):
                    gone.delattr(owner, last)
            assert list(missing_places([place])) == [f"{place.name} is not there"]


def without_parameter(target: Any, name: str) -> Callable[..., None]:
    signature = inspect.signature(target)

    def stand_in(*_: Any, **__: Any) -> None: ...

    kept = [parameter for parameter in signature.parameters.values() if parameter.name != name]
    stand_in.__signature__ = signature.replace(parameters=kept)  # type: ignore[attr-defined]
    return stand_in


@pytest.fixture
def renamed(tmp_path: Path) -> Iterator[Rename]:
    """A function as another SGLang might have it, where a name is another."""

    def rename(target: Any, old: str, new: str) -> Any:
        function = inspect.unwrap(target)
        source = ast.unparse(ast.parse(textwrap.dedent(inspect.getsource(function)))).replace(old, new)
        tree = ast.parse(f"from __future__ import annotations\n{source}")
        made = tree.body[-1]
        assert isinstance(made, ast.FunctionDef | ast.AsyncFunctionDef)
        made.decorator_list = []
        path = tmp_path / "renamed.py"
        path.write_text(ast.unparse(tree))
        linecache.checkcache(str(path))
        space: dict[str, Any] = {}
        exec(compile(path.read_text(), str(path), "exec"), dict(function.__globals__), space)
        return space[made.name]

    yield rename
    linecache.clearcache()


def wanted_names() -> list[tuple[Place, str, str]]:
    """(place, kind of name, name) of all that is looked for in signatures and code."""
    kinds = ("parameters", "attributes", "texts", "calls")
    return [(place, kind, name) for place in all_places() for kind in kinds for name in getattr(place, kind)]


@pytest.mark.extended
def test_each_name_that_is_another_is_named(monkeypatch: pytest.MonkeyPatch, renamed: Rename) -> None:
    for place, kind, name in wanted_names():
        owners, last = holders(place)
        target = place.find()
        if kind == "parameters":
            other = without_parameter(target, name)
        else:
            other = renamed(target, name, f"another_{name}")
        with monkeypatch.context() as changed:
            changed.setattr(owners[0], last, other)
            [line] = missing_places([Place(place.module, place.attribute, **{kind: (name,)})])
        assert line.startswith(place.name)
        assert line.endswith(name)
        assert "\n" not in line


# --- what is tried


def test_the_pool_is_attached_as_meant() -> None:
    assert selfcheck.wrong_attachment() == ""


@pytest.mark.parametrize(
    ("method", "old", "new", "said"),
    [
        ("attach_storage_backend", "interface_v1", "interface_v3", "_generic_page_get and _generic_page_set"),
        ("attach_storage_backend", "'dynamic'", "'dynamic2'", "_generic_page_get and _generic_page_set"),
        (
            "attach_storage_backend",
            "max(prefetch_threshold",
            "max(2 * prefetch_threshold",
            "from 8 tokens on",
        ),
        ("_page_get_zero_copy", "batch_get_v1", "batch_get_v3", "not by interface v1"),
        ("_page_set_zero_copy", "batch_set_v1", "batch_set_v3", "AttributeError"),
        ("attach_storage_backend", "self._page_get_zero_copy", "self._page_read", "AttributeError"),
    ],
)
def test_an_attachment_that_is_not_as_meant_is_named(
    method: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch, renamed: Rename
) -> None:
    from sglang.srt.managers.cache_controller import HiCacheController

    changed = renamed(getattr(HiCacheController, method), old, new)
    monkeypatch.setattr(HiCacheController, method, changed)
    assert said in selfcheck.wrong_attachment()


@pytest.mark.parametrize(
    ("method", "old", "new", "said"),
    [
        ("_page_transfer_sidecar", "batch_get_v2", "batch_get_v4", "their parts not by v2"),
        ("_page_transfer_sidecar", "_sync_trailing_keys", "_gone", "AttributeError"),
        ("_page_backup_with_stable_layout", "batch_set_v2", "batch_set_v4", "AttributeError"),
    ],
)
def test_parts_that_move_in_another_way_are_named(
    method: str, old: str, new: str, said: str, monkeypatch: pytest.MonkeyPatch, renamed: Rename
) -> None:
    from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController

    changed = renamed(getattr(HybridCacheController, method), old, new)
    monkeypatch.setattr(HybridCacheController, method, changed)
    assert said in selfcheck.wrong_attachment()


def test_reading_by_another_method_than_the_wrapped_one_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.cache_controller import HiCacheController

    def batch(self: Any, operation: Any, hashes: Any, indices: Any, extra: Any, _: Any) -> int:
        return sum(self.storage_backend.batch_get_v1(hashes, indices, extra))

    monkeypatch.setattr(HiCacheController, "_page_transfer_kv_batch", batch)
    assert selfcheck.wrong_attachment() == "SGLang does not read pages by _page_get_zero_copy"


def test_all_that_does_not_fit_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    monkeypatch.delattr(TokenizerManager, "_tokenize_texts")
    monkeypatch.delattr(TokenizerManager, "abort_request")
    with pytest.raises(StartupError) as refused:
        selfcheck.check("cuda")
    said = str(refused.value)
    assert "\n" not in said
    assert "TokenizerManager._tokenize_texts is not there" in said
    assert "TokenizerManager.abort_request is not there" in said
    assert f"tested with {selfcheck.TESTED_SGLANG}" in said


def test_a_module_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(selfcheck, "MODULES", ("gone",))
    assert list(selfcheck.missing()) == ["gone: No module named 'pdserve.engine.sglang.gone'"]


def test_a_module_of_sglang_that_is_gone_is_named() -> None:
    [line] = missing_places([Place("sglang.srt.gone", "x")])
    assert line == "sglang.srt.gone.x: No module named 'sglang.srt.gone'"


def test_another_sglang_version_is_warned_of_and_checked_whole(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    checked: list[str] = []
    monkeypatch.setattr(selfcheck, "check", checked.append)
    selfcheck.check_start("cpu")
    assert checked == [], "the pinned SGLang is checked by the tests"
    found = {"sglang": "9.9.9", "torch": metadata.version("torch")}
    monkeypatch.setattr(selfcheck, "version", found.__getitem__)
    selfcheck.check_start("cpu")
    assert "SGLang 9.9.9 is installed; pdserve is tested with" in caplog.text
    assert checked == ["cpu"]


def test_a_torch_that_sglang_was_not_built_for_ends_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seen with torch 2.9 below SGLang 0.5.23: its tree core read wrong types at the first prompt."""
    monkeypatch.setattr(selfcheck, "version", {"sglang": "0.5.23", "torch": "1.2.3+cpu"}.__getitem__)
    with pytest.raises(StartupError, match=r"torch 1\.2\.3\+cpu is installed, but SGLang 0\.5\.23 needs"):
        selfcheck.check_start("cpu")


def test_a_constant_of_sglang_that_is_gone_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    from pdserve.engine.sglang.cpu import hooks

    assert list(hooks.missing()) == []
    sender = [hook for hook in hooks.SCHEDULER_HOOKS if hook.module == hooks.SENDER]
    monkeypatch.delattr(MooncakeKVSender, "supports_host_tensor_indices")
    with pytest.raises(AttributeError, match=r"MooncakeKVSender.supports_host_tensor_indices \(not there\)"):
        hooks.apply((*sender,))
