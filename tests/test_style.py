"""Limits that keep the code readable: sizes, broad excepts, names, leftovers, machine paths."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
SOURCES = sorted((ROOT / "pdserve").rglob("*.py"))
MAX_MODULE_LINES = 600
MAX_FUNCTION_LINES = 70
TESTS_OF_NO_PACKAGE = {
    "benchmarks",
    "chaos",
    "gpu",
    "contracts",
    "docs",
    "e2e",
    "hostile",
    "netns",
    "support",
}
"""Folders of tests/ that mirror no package: contracts of several implementations, whole clusters, helpers."""

MAYBE_BROAD = re.compile(r"\bexcept\b[^\n]*\b(?:Base)?Exception\b|\bexcept\s*:|\bexcept \($", re.MULTILINE)
BOUNDARY = re.compile(r"#.*\bboundary\b.*: \w+")
LEFTOVER = re.compile(r"\b(TODO|FIXME|XXX)\b")
# in pieces, so that this file does not find itself
MACHINE_PATH = re.compile(
    r"(?:^|[^\w.])/(?:" + "|".join(["wo" + "rk", "ro" + "ot", "fa" + "rm"]) + r")/|/tmp/" + "vt"
)


def long_functions(source: str) -> Iterator[str]:
    """Functions longer than the limit, decorators and docstring counted."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            lines = (node.end_lineno or node.lineno) - node.lineno + 1
            if lines > MAX_FUNCTION_LINES:
                yield f"{node.lineno}: {node.name} has {lines} lines"


def broad_excepts(source: str) -> Iterator[str]:
    """Handlers of everything that neither say why nor raise on what they caught."""
    if not MAYBE_BROAD.search(source):
        return
    text = source.splitlines()
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.ExceptHandler):
            continue
        named = node.type.elts if isinstance(node.type, ast.Tuple) else [node.type]
        broad = any(
            n is None or (isinstance(n, ast.Name) and n.id in ("Exception", "BaseException")) for n in named
        )
        raises_on = isinstance(node.body[-1], ast.Raise) and node.body[-1].exc is None
        # the reason stands on the handler's line or just above or below it
        near = "\n".join(text[max(0, node.lineno - 2) : node.lineno + 1])
        if broad and not raises_on and not BOUNDARY.search(near):
            yield f"{node.lineno}: {text[node.lineno - 1].strip()}"


def findings(check) -> list[str]:  # type: ignore[no-untyped-def]
    return [f"{path.relative_to(ROOT)}:{found}" for path in SOURCES for found in check(path.read_text())]


def test_modules_are_at_most_600_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): n
        for path in SOURCES
        if (n := len(path.read_text().splitlines())) > MAX_MODULE_LINES
    }
    assert long == {}


def test_functions_are_at_most_70_lines() -> None:
    assert findings(long_functions) == []


def test_broad_excepts_say_why() -> None:
    assert findings(broad_excepts) == []


def packages() -> Iterator[Path]:
    return (path.parent for path in SOURCES if path.name == "__init__.py")


def test_each_package_says_what_belongs_there() -> None:
    said = {
        folder: ast.get_docstring(ast.parse((folder / "__init__.py").read_text())) for folder in packages()
    }
    silent = [str(folder.relative_to(ROOT)) for folder, text in said.items() if len((text or "").split()) < 4]
    assert silent == []


def test_tests_mirror_the_packages() -> None:
    folders = {path.parent.relative_to(ROOT / "tests") for path in (ROOT / "tests").rglob("test_*.py")}
    strange = [
        str(folder)
        for folder in folders
        if folder.parts
        and folder.parts[0] not in TESTS_OF_NO_PACKAGE
        and not (ROOT / "pdserve" / folder).is_dir()
    ]
    assert strange == []


def imports_of_tests(source: str) -> Iterator[str]:
    """Test modules and conftests that a module imports, relative imports too."""
    if not re.search(r"import.*\btest_|from.*\btest_|conftest", source):
        return
    for node in ast.walk(ast.parse(source)):
        named = []
        if isinstance(node, ast.ImportFrom):
            named = [node.module or "", *(f"{node.module or ''}.{name.name}" for name in node.names)]
        elif isinstance(node, ast.Import):
            named = [name.name for name in node.names]
        if found := [name for name in named if re.search(r"(^|\.)(test_\w+|conftest)$", name)]:
            yield f"{node.lineno}: {found[0]}"


def test_no_test_module_imports_another() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line in imports_of_tests(path.read_text())
    ]
    assert found == []


@pytest.mark.parametrize(
    "source",
    ["from tests.router.test_app import x", "from .test_app import x", "from tests.e2e import conftest"],
)
def test_an_import_of_a_test_module_is_found(source: str) -> None:
    assert list(imports_of_tests(source))


def test_no_module_is_named_utils() -> None:
    assert [str(path) for path in SOURCES if re.search(r"util|helper|misc|common", path.stem)] == []


def test_options_are_described_below_them_and_not_in_their_types() -> None:
    assert findings(lambda source: re.findall(r"Meta\([^()]*\bdescription=", source)) == []


def test_no_leftovers() -> None:
    assert findings(lambda source: (m[0] for m in LEFTOVER.finditer(source))) == []


def test_no_path_of_one_machine_in_tracked_files() -> None:
    listed = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=False)
    names = [name for name in listed.stdout.decode().split("\0") if name]
    found = []
    for name in names:
        try:
            text = (ROOT / name).read_text()
        except (UnicodeDecodeError, FileNotFoundError):
            continue
        found += [f"{name}: {m[0]}" for m in MACHINE_PATH.finditer(text)]
    assert found == []


@pytest.mark.parametrize(
    ("source", "count"),
    [
        ("try:\n    f()\nexcept Exception:\n    pass", 1),
        ("try:\n    f()\nexcept:\n    pass", 1),
        ("try:\n    f()\nexcept (ValueError, Exception):\n    pass", 1),
        ("try:\n    f()\nexcept Exception:  # boundary: SGLang's thread must live\n    pass", 0),
        ("try:\n    f()\nexcept BaseException:\n    g()\n    raise", 0),
        ("try:\n    f()\nexcept ValueError:\n    pass", 0),
    ],
)
def test_the_check_of_broad_excepts_can_fail(source: str, count: int) -> None:
    assert len(list(broad_excepts(source))) == count


def test_the_check_of_function_length_can_fail() -> None:
    body = "    x = 1\n" * MAX_FUNCTION_LINES
    assert list(long_functions(f"def f():\n{body}")) == [f"1: f has {MAX_FUNCTION_LINES + 1} lines"]
    assert list(long_functions(f"def f():\n{body[:-10]}")) == []
