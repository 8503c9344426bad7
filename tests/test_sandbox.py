"""The sandbox: what an answer may not do, under both kinds of isolation, and what its tests may.

Every hostile answer here would score if it got away with it: it defines the right `square`, or prints the right number,
after its attempt.
"""

import os
import pickle
import signal
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from trl_gmts.tasks import Limits, Sandbox, SandboxError
from trl_gmts.tasks.sandbox import in_parallel


pytestmark = pytest.mark.sandbox

ROOMY = Limits(wall_seconds=30.0)
TIGHT = Limits(wall_seconds=2.0, cpu_seconds=1, memory_bytes=256 << 20, file_bytes=1 << 20, disk_bytes=4 << 20)
TESTS = "from solution import square\n\nassert square(3) == 9\nassert square(-2) == 4\n"
RIGHT = "def square(x):\n    return x * x\n"

both = pytest.mark.parametrize("isolation", ["bubblewrap", "rlimits"])


def children_of(pid: int) -> set[int]:
    """Processes below this one, at any depth."""
    pairs = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            after_name = (entry / "stat").read_text().rpartition(")")[2]
        except OSError:  # it has just ended
            continue
        pairs.append((int(entry.name), int(after_name.split()[1])))
    found, new = set(), {pid}
    while new:
        new = {child for child, parent in pairs if parent in new} - found
        found |= new
    return found


def all_gone(pids: set[int], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while any(Path(f"/proc/{pid}").exists() for pid in pids):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


@both
def test_a_right_answer_passes_and_a_wrong_one_does_not(isolation):
    sandbox = Sandbox(isolation, ROOMY)
    assert sandbox.passes_tests(RIGHT, TESTS)
    assert not sandbox.passes_tests("def square(x):\n    return x + x\n", TESTS)
    assert not sandbox.passes_tests("", TESTS)
    assert not sandbox.passes_tests("def square(x:\n", TESTS)
    assert sandbox.run_program("print(int(input()) ** 2)", "3\n") == (True, "9\n")


HOSTILE = {
    "loops": "while True:\n    pass\n",
    "sleeps": "import time\ntime.sleep(60)\n",
    "forks": "import os\nos.fork()\n",
    "forks through subprocess": "import subprocess\nsubprocess.run(['true'])\n",
    "forks through multiprocessing": "import multiprocessing\nmultiprocessing.Process(target=print).start()\n",
    "fork bomb": "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass\n",
    "thread bomb": "import threading, time\nwhile True:\n    threading.Thread(target=time.sleep, args=(60,)).start()\n",
    "fills memory": "x = []\nwhile True:\n    x.append(bytearray(1 << 20))\n",
    "fills memory at once": "x = bytearray(1 << 40)\n",
    "writes one large file": "with open('x', 'wb') as f:\n    for _ in range(64):\n        f.write(bytes(1 << 20))\n",
    "opens a socket": "import socket\nsocket.socket().connect(('127.0.0.1', 9))\n",
    "listens": "import socket\ns = socket.socket()\ns.bind(('127.0.0.1', 0))\ns.listen()\n",
    "resolves a name": "import socket\nsocket.getaddrinfo('example.org', 80)\n",
    "prints for ever": "while True:\n    print('x' * 1000)\n",
    "prints for ever to stderr": "import sys\nwhile True:\n    print('x' * 1000, file=sys.stderr)\n",
    "becomes another program": "import os\nos.execv('/bin/sh', ['sh', '-c', 'exit 0'])\n",
    "kills its parent": "import os, signal\nos.kill(os.getppid(), signal.SIGKILL)\n",
    "kills everything": "import os, signal\nos.kill(-1, signal.SIGKILL)\n",
    "raises its limits": "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (resource.RLIM_INFINITY,) * 2)\n",
    "exits early": "import sys\nsys.exit(0)\n",
    "exits early, hard": "import os\nos._exit(0)\n",
    "crashes": "import ctypes\nctypes.string_at(0)\n",
    "recurses": "def f(): return f()\nf()\n",
    "holds too large an integer": "x = 9 ** 9 ** 9\n",
}


@both
@pytest.mark.parametrize("attempt", HOSTILE)
def test_an_answer_that(isolation, attempt):
    before = time.monotonic()
    assert not Sandbox(isolation, TIGHT).passes_tests(HOSTILE[attempt] + RIGHT, TESTS)
    assert time.monotonic() - before < TIGHT.wall_seconds + 3


def test_filling_the_disk_with_many_files_ends_at_the_limit(tmp_path):
    # with "rlimits" nothing stops this but the deadline, and the folder is removed after it
    fill = "n = 0\nwhile True:\n    n += 1\n    open(f'{n}', 'wb').write(bytes(1 << 20))\n"
    assert not Sandbox("bubblewrap", TIGHT).passes_tests(fill + RIGHT, TESTS)
    count = (
        "n = 0\ntry:\n    while True:\n        open(f'{n}', 'wb').write(bytes(1 << 19))\n        n += 1\n"
        "except OSError as error:\n    print(n, error.errno)\n"
    )
    written, error = Sandbox("bubblewrap", TIGHT).run_program(count).output.split()
    assert int(written) <= 8 and int(error) == 28  # no space left on device


def test_nothing_outside_its_folder_can_be_written_or_found(tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("42")
    sandbox = Sandbox("bubblewrap", TIGHT)
    for path in [
        str(secret),
        "/etc/passwd",
        "/proc/self/environ",
        os.getcwd() + "/pyproject.toml",
    ]:
        assert not sandbox.passes_tests(f"import os\nos.stat({path!r})\n" + RIGHT, TESTS), path
    for path in ["/x", "/dev/x", "/dev/shm/x", "/usr/x", "/inside/x", str(tmp_path / "x")]:
        assert not sandbox.passes_tests(f"open({path!r}, 'w')\n" + RIGHT, TESTS), path
    assert secret.read_text() == "42" and list(tmp_path.iterdir()) == [secret]


@both
def test_nothing_is_inherited_from_the_trainer(isolation, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_secret")
    monkeypatch.setenv("PYTHONPATH", os.getcwd())
    look = (
        "import os, sys\nprint('HF_TOKEN' in os.environ, 'PYTHONPATH' in os.environ)\n"
        "print(os.listdir('.'), os.getcwd() == " + repr(os.getcwd()) + ")\n"
        "def is_open(fd):\n    try:\n        os.fstat(fd)\n    except OSError:\n        return False\n    return True\n"
        "print([fd for fd in range(3, 64) if is_open(fd)])\n"
        "print(any(name.split('.')[0] in ('torch', 'trl_gmts', 'numpy') for name in sys.modules))\n"
    )
    read_end, write_end = os.pipe()
    os.set_inheritable(read_end, True)
    try:
        output = Sandbox(isolation, ROOMY).run_program(look).output
    finally:
        os.close(read_end)
        os.close(write_end)
    assert output.split("\n") == ["False False", "[] False", "[]", "False", ""]


@both
@pytest.mark.parametrize(
    "escape",
    [
        "import os\nif os.fork() == 0:\n    os.setsid()\n    if os.fork() == 0:\n        import time\n        time.sleep(60)\n",
        "import os\nos.posix_spawn('/bin/sleep', ['sleep', '60'], {})\n",
        "import ctypes, time\nif ctypes.CDLL(None).fork() == 0:\n    time.sleep(60)\n",
        "import ctypes, time\nif ctypes.CDLL(None).syscall(56, 17, 0, 0, 0, 0) == 0:\n    time.sleep(60)\n",
        "import time\ntime.sleep(60)\n",
    ],
)
def test_nothing_outlives_the_deadline(isolation, escape):
    with ThreadPoolExecutor(1) as pool:
        run = pool.submit(Sandbox(isolation, TIGHT).passes_tests, escape + RIGHT, TESTS)
        seen: set[int] = set()
        while not run.done():
            seen |= children_of(os.getpid())
            time.sleep(0.002)
    # Whether it scores is not asked: an attempt that is refused, and that the answer takes no notice of, did no harm.
    assert seen and all_gone(seen)


CHEATS = {
    "prints a verdict": "print('started')\nprint('passed')\nprint('OK')\n",
    "writes a verdict to every descriptor": (
        "import os\nfor fd in range(3, 64):\n    try:\n        os.write(fd, b'started\\n' + b'0' * 32)\n"
        "    except OSError:\n        pass\n"
    ),
    "sends a forged reply": (
        "import os, pickle, struct\nfor fd in range(64):\n    try:\n        data = pickle.dumps(('reply', 'value', 9, {}))\n"
        "        os.write(fd, struct.pack('<I', len(data)) + data)\n    except OSError:\n        pass\nos._exit(0)\n"
    ),
    "sends code to run": (
        "import os, pickle, struct\nclass Run:\n    def __reduce__(self):\n        return os._exit, (0,)\n"
        "data = pickle.dumps(Run())\nfor fd in range(64):\n    try:\n"
        "        os.write(fd, struct.pack('<I', len(data)) + data)\n    except OSError:\n        pass\nos._exit(0)\n"
    ),
    "sends rubbish": "import os\nfor fd in range(64):\n    try:\n        os.write(fd, b'\\xff' * 64)\n    except OSError:\n        pass\n",
    "returns what equals everything": (
        "class Any:\n    def __eq__(self, other):\n        return True\n    def __ne__(self, other):\n        return False\n"
        "def square(x):\n    return Any()\n"
    ),
    "returns a number that equals everything": (
        "class Any(int):\n    def __eq__(self, other):\n        return True\n    __hash__ = int.__hash__\n"
        "def square(x):\n    return Any(0)\n"
    ),
    "returns a string that equals everything": (
        "class Any(str):\n    def __eq__(self, other):\n        return True\n    __hash__ = str.__hash__\n"
        "def square(x):\n    return Any()\n"
    ),
    "replaces built-in functions": (
        "import builtins\nbuiltins.AssertionError = SystemExit\nbuiltins.isinstance = lambda *a: True\n"
        "builtins.abs = lambda x: 0\ndef square(x):\n    return 0\n"
    ),
    "replaces the tests' frames": (
        "import sys, gc\nfor thing in gc.get_objects():\n    if isinstance(thing, dict) and 'tests' in thing:\n"
        "        thing['tests'] = ''\ndef square(x):\n    frame = sys._getframe()\n    while frame:\n"
        "        frame.f_locals.update(passed=True)\n        frame = frame.f_back\n    return 0\n"
    ),
    "leaves at the first call": "import os\ndef square(x):\n    os._exit(0)\n",
    "leaves at the first call, softly": "import sys\ndef square(x):\n    sys.exit(0)\n",
    "raises what ends a program": "def square(x):\n    raise KeyboardInterrupt\n",
    "looks for the tests": (
        "import os\ndef square(x):\n    for folder, _, files in os.walk('/'):\n        for name in files:\n"
        "            if name.startswith('test_answer'):\n                return int(open(folder + '/' + name).read()[-3:])\n"
        "    return 0\n"
    ),
}


@both
@pytest.mark.parametrize("cheat", CHEATS)
def test_no_verdict_is_had_by_an_answer_that(isolation, cheat):
    wrong = "" if "def square" in CHEATS[cheat] else "def square(x):\n    return 0\n"
    assert not Sandbox(isolation, TIGHT).passes_tests(wrong + CHEATS[cheat], TESTS)


SLY = {
    "plain data": "0",
    "itself": "self",
    "another object": "Any()",
    "what an object holds": "Any().held()",
}


@pytest.mark.parametrize("gives", SLY)
@pytest.mark.parametrize(
    "tests",
    [
        "assert abs(square(3) - 9) < 1e-6",
        "assert abs(9 - square(3)) < 1e-6",
        "assert round(square(3) - 9, 3) == 0",
        "assert -1e-6 < float(square(3) - 9) < 1e-6",
        "assert abs(-(square(3) - 9)) < 1e-6",
        "assert square(3) <= 9 <= square(3)",
        "assert square(3) >= 9",
        "assert 9 == square(3)",
        "import unittest\nunittest.TestCase().assertAlmostEqual(square(3), 9)",
    ],
)
def test_an_object_of_the_answer_does_not_decide_how_near_it_is_to_what_is_expected(gives, tests):
    sly = (
        f"class Any:\n    def __sub__(self, other): return {SLY[gives]}\n    def held(self): return self\n"
        "    __rsub__ = __neg__ = __lt__ = __le__ = __ge__ = __gt__ = lambda self, *other: self - 0\n"
        "    __abs__ = __float__ = lambda self: 0.0\n    __round__ = lambda self, n: 0\n"
        "    __bool__ = lambda self: True\n    __eq__ = lambda self, other: True\n    __hash__ = None\n"
        "def square(x):\n    return Any()\n"
    )
    assert not Sandbox(limits=TIGHT).passes_tests(sly, "from solution import square\n" + tests)
    assert Sandbox(limits=TIGHT).passes_tests(RIGHT, "from solution import square\n" + tests)


SUPPORTED = {
    "containers": (
        "import collections, datetime, decimal\ndef f(x): return {'a': [1, (2, 3)], 'b': {4}, 'c': x}\n"
        "def g(): return collections.Counter('aab'), datetime.date(2026, 1, 2), decimal.Decimal('1.5'), 1j, b'x', None\n",
        "import collections, datetime, decimal\nfrom solution import f, g\nassert f(5) == {'a': [1, (2, 3)], 'b': {4}, 'c': 5}\n"
        "assert g() == (collections.Counter(a=2, b=1), datetime.date(2026, 1, 2), decimal.Decimal('1.5'), 1j, b'x', None)\n"
        "assert isinstance(f(5)['a'], list)\n",
    ),
    "arguments changed in place": (
        "def f(x, y):\n    x.sort()\n    y['k'] = 1\n",
        "from solution import f\na, b = [3, 1, 2], {}\nassert f(a, b) is None\nassert a == [1, 2, 3] and b == {'k': 1}\n",
    ),
    "exceptions": (
        "class Bad(ValueError): pass\ndef f(x):\n    raise Bad('no', x)\ndef g(x):\n    return {}[x]\n",
        "import pytest\nfrom solution import Bad, f, g\n\ndef test_it():\n    with pytest.raises(Bad, match='no'):\n"
        "        f(1)\n    with pytest.raises(ValueError):\n        f(1)\n    with pytest.raises(KeyError):\n        g(1)\n",
    ),
    "classes": (
        "class Stack:\n    def __init__(self): self.items = []\n    def push(self, x): self.items.append(x)\n"
        "    def pop(self): return self.items.pop()\n    def __len__(self): return len(self.items)\n"
        "    def __contains__(self, x): return x in self.items\n    def __eq__(self, o): return self.items == o.items\n",
        "from solution import Stack\ns, t = Stack(), Stack()\ns.push(1); s.push(2)\nassert len(s) == 2 and 1 in s and 3 not in s\n"
        "assert s != t\nt.push(1); t.push(2)\nassert s == t and isinstance(s, Stack)\nassert s.pop() == 2 and s.items == [1]\n",
    ),
    "vectors": (
        "class V:\n    def __init__(self, x): self.x = x\n    def __add__(self, o): return V(self.x + o.x)\n"
        "    def __mul__(self, k): return V(self.x * k)\n    __rmul__ = __mul__\n    def __eq__(self, o): return self.x == o.x\n",
        "from solution import V\nassert V(1) + V(2) == V(3) and V(2) * 3 == V(6) == 3 * V(2)\n",
    ),
    "generators and context managers": (
        "from contextlib import contextmanager\ndef f(n):\n    yield from range(n)\n@contextmanager\ndef c():\n    yield 5\n",
        "from solution import c, f\nassert list(f(3)) == [0, 1, 2]\nassert sum(f(4)) == 6\nwith c() as x:\n    assert x == 5\n",
    ),
    "functions as arguments": (
        "def apply(f, xs): return [f(x) for x in xs]\ndef adder(n): return lambda x: x + n\n",
        "from solution import adder, apply\nassert apply(lambda x: x + 1, [1, 2]) == [2, 3]\nassert adder(2)(3) == 5\n"
        "assert apply(adder(1), [1]) == [2]\n",
    ),
    "named tuples and enumerations": (
        "from collections import namedtuple\nfrom enum import Enum, IntEnum\nP = namedtuple('P', 'x y')\nclass C(IntEnum):\n    RED = 1\n"
        "class S(str, Enum):\n    A = 'a'\ndef h(): return S.A\n"
        "def f(): return P(1, 2)\ndef g(): return C.RED\n",
        "from solution import f, g, h\nassert h() == 'a' and h().name == 'A'\nassert f() == (1, 2) and f().x == 1\na, b = f()\nassert (a, b) == (1, 2) and g() == 1 and g() < 2\n",
    ),
    "numpy arrays": (
        "import numpy as np\ndef f(n): return np.arange(n) * 2.0\ndef g(a): return a.sum()\n",
        "import numpy as np\nfrom solution import f, g\nnp.testing.assert_allclose(f(3), [0, 2, 4])\nassert g(np.ones(3)) == 3\n"
        "assert f(3).dtype == np.float64\n",
    ),
    "fixtures and marks of pytest": (
        "def square(x):\n    return x * x\n",
        "import pytest\nfrom solution import square\n@pytest.mark.parametrize('x,y', [(1, 1), (3, 9)])\n"
        "def test_square(x, y, tmp_path):\n    assert square(x) == y and tmp_path.is_dir()\n",
    ),
}


@pytest.mark.parametrize("what", SUPPORTED)
def test_tests_can_use(what):
    code, tests = SUPPORTED[what]
    assert Sandbox(limits=ROOMY).passes_tests(code, tests, pytest="import pytest" in tests)
    assert not Sandbox(limits=ROOMY).passes_tests("", tests, pytest="import pytest" in tests)


def test_a_file_of_tests_without_a_test_does_not_pass_under_pytest():
    assert not Sandbox(limits=ROOMY).passes_tests(RIGHT, "import pytest\n", pytest=True)


def test_test_functions_are_called_without_pytest_too():
    assert Sandbox(limits=ROOMY).passes_tests(
        RIGHT, "from solution import square\ndef test_a():\n    assert square(1) == 1\n"
    )
    assert not Sandbox(limits=ROOMY).passes_tests(
        RIGHT, "from solution import square\ndef test_a():\n    assert square(1) == 2\n"
    )


CASES = "import unittest\nclass TestIt(unittest.TestCase):\n    def test_a(self):\n        self.assertEqual(square(3), 9)\n"


@both
def test_cases_that_share_the_process_pass_and_fail(isolation):
    sandbox = Sandbox(isolation, ROOMY)
    assert sandbox.passes_together(RIGHT, CASES)
    assert not sandbox.passes_together("def square(x):\n    return 0\n", CASES)
    assert not sandbox.passes_together(RIGHT, "x = 1\n")


@pytest.mark.parametrize("cheat", ["exits early", "exits early, hard", "loops", "prints for ever"])
def test_the_plain_cheats_fail_in_a_shared_process_too(cheat):
    assert not Sandbox(limits=TIGHT).passes_together(HOSTILE[cheat] + RIGHT, CASES)
    assert not Sandbox(limits=TIGHT).passes_together(
        CHEATS["writes a verdict to every descriptor"] + "def square(x): return 0\n", CASES
    )


@both
def test_a_program_that_prints_too_much_is_cut(isolation):
    run = Sandbox(isolation, TIGHT).run_program("while True:\n    print('x' * 1000)\n")
    assert not run.succeeded and len(run.output) <= TIGHT.file_bytes


@both
def test_programs_fail_when_they_exit_with_an_error_or_too_late(isolation):
    sandbox = Sandbox(isolation, ROOMY)
    assert sandbox.run_program("print(1)\nraise SystemExit(1)") == (False, "1\n")
    late = Sandbox(isolation, TIGHT).run_program("print(1, flush=True)\nimport time\ntime.sleep(60)")
    assert late == (False, "1\n")
    assert sandbox.run_program("print(1)\nraise SystemExit(0)") == (True, "1\n")
    assert not sandbox.run_program("x = '\ud800'").succeeded  # not encodable


def test_a_missing_bubblewrap_is_an_error_that_says_what_to_do(monkeypatch, tmp_path):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SandboxError, match=r'(?s)apt-get install bubblewrap.*isolation="rlimits"'):
        Sandbox().check()


def test_a_bubblewrap_that_may_not_make_namespaces_is_an_error_that_says_so(monkeypatch, tmp_path):
    fake = tmp_path / "bwrap"  # as the real one on a machine without user namespaces
    fake.write_text("#!/bin/sh\necho 'bwrap: No permissions to create new namespace' >&2\nexit 1\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(
        SandboxError, match=r'(?s)No permissions to create new namespace.*user namespaces.*isolation="rlimits"'
    ):
        Sandbox().check()


def test_an_unknown_isolation_is_refused():
    with pytest.raises(ValueError, match="bubblewrap, rlimits"):
        Sandbox("none")  # type: ignore[arg-type]


def test_many_at_a_time_and_from_other_threads():
    sandbox = pickle.loads(pickle.dumps(Sandbox(limits=TIGHT)))
    codes = [RIGHT, "def square(x):\n    return 0\n"] * 4
    assert in_parallel(lambda code: sandbox.passes_tests(code, TESTS), codes, workers=2) == [True, False] * 4
    assert in_parallel(len, []) == []


@both
def test_the_sandbox_dies_with_the_trainer(isolation, tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # a killed trainer cannot remove the answer's folder
    trainer = os.fork()
    if trainer == 0:
        Sandbox(isolation, ROOMY).run_program("import time\ntime.sleep(60)")
        os._exit(0)
    try:
        deadline = time.monotonic() + 60
        while not (children := children_of(trainer)) and time.monotonic() < deadline:
            time.sleep(0.1)
        time.sleep(1.0)  # until the innermost process has started too
        children |= children_of(trainer)
    finally:
        os.kill(trainer, signal.SIGKILL)
        os.waitpid(trainer, 0)
    assert children and all_gone(children)
