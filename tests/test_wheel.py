"""The wheel that users get: what is in it, and that it works where nothing else is installed."""

import ast
import os
import re
import subprocess
import sys
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from trl_gmts.seams import SUPPORTED_TRL


ROOT = Path(__file__).parent.parent
pytestmark = [pytest.mark.wheel, pytest.mark.timeout(1200)]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--wheel", "--outdir", folder, ROOT)
    (path,) = folder.glob("*.whl")
    return path


def run(*command, **kwargs):
    result = subprocess.run([str(part) for part in command], capture_output=True, text=True, **kwargs)
    assert result.returncode == 0, f"{command}\n{result.stdout[-4000:]}\n{result.stderr[-4000:]}"
    return result.stdout


def metadata(wheel):
    with zipfile.ZipFile(wheel) as archive:
        (name,) = [name for name in archive.namelist() if name.endswith(".dist-info/METADATA")]
        return message_from_bytes(archive.read(name))


def test_the_wheel_holds_the_package_its_type_marker_and_its_licence_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    modules = {str(path.relative_to(ROOT)) for path in (ROOT / "trl_gmts").rglob("*.py")}
    assert modules | {"trl_gmts/py.typed"} == {name for name in names if ".dist-info/" not in name}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)


def test_the_wheel_has_the_version_of_the_source(wheel):
    (version,) = re.findall(r'^__version__ = "(.+)"$', (ROOT / "trl_gmts/__init__.py").read_text(), re.MULTILINE)
    assert metadata(wheel)["Version"] == version
    assert wheel.name == f"trl_gmts-{version}-py3-none-any.whl"


def test_the_wheel_depends_only_on_what_the_package_imports_and_on_the_trl_it_checks_for(wheel):
    requirements = [Requirement(text) for text in metadata(wheel).get_all("Requires-Dist")]
    runtime = {requirement.name: requirement for requirement in requirements if requirement.marker is None}
    assert set(runtime) <= imported_packages()
    assert runtime["trl"].specifier == Requirement(f"trl{SUPPORTED_TRL}").specifier


def imported_packages():
    """Top-level names that the package's modules import, wherever in a module they do."""
    names = set()
    for path in (ROOT / "trl_gmts").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                names |= {alias.name.split(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                names.add(node.module.split(".")[0])
    return names


def test_the_wheel_installs_in_an_empty_environment_and_imports(wheel, tmp_path):
    venv.create(tmp_path / "empty", with_pip=True)
    python = tmp_path / "empty" / ("Scripts" if os.name == "nt" else "bin") / "python"
    run(python, "-m", "pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", wheel)
    # From another folder, so that what is imported is the wheel and not this checkout.
    where = run(
        python,
        "-c",
        "from trl_gmts import GMTSGRPOConfig, GMTSGRPOTrainer; import trl_gmts; print(trl_gmts.__file__)",
        cwd=tmp_path,
        env={key: value for key, value in os.environ.items() if key != "PYTHONPATH"},
    )
    assert (tmp_path / "empty") in Path(where.strip()).parents
    run(python, "-m", "pip", "check")
