"""What a snippet must not be able to do, and that ending it leaves nothing behind."""

import json
import os
import tempfile
from pathlib import Path

from tests.sandbox.conftest import runner, small_server, wait_until
from tests.sandbox.other_users import open_interpreter
from tests.sandbox.sandbox_http import health
from tests.support.deadlines import scaled


def test_nothing_of_the_server_is_visible(execute):
    environment = json.loads(execute("import json, os\nprint(json.dumps(dict(os.environ)))").stdout)
    assert environment.keys().isdisjoint({"PYTHONPATH", "USER", "LOGNAME", "PYTEST_CURRENT_TEST"})
    open_files = "import os\ndef f(n):\n    try: os.fstat(n); return True\n    except OSError: return False\n"
    assert execute(open_files + "print([n for n in range(200) if f(n)])").stdout == "[0, 1, 2]\n"


def _left_in(directory: Path) -> list[str]:
    """Names in it; none between one run's and the next, when it does not exist."""
    try:
        return os.listdir(directory)
    except FileNotFoundError:
        return []


def test_work_directory_is_removed_whatever_is_in_it(tmp_path, monkeypatch):
    """At a level whose runs keep their files in the server's file system."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    code = """
import os
print(os.getcwd(), flush=True)
os.symlink('/usr', 'link'); os.mkdir('closed'); open('closed/f', 'w').close(); os.chmod('closed', 0)
for _ in range(1500):
    os.mkdir('d'); os.chdir('d')
"""
    for folder in (tmp_path, *tmp_path.parents):  # runs have users of their own
        if Path(tempfile.gettempdir()) in folder.parents:
            folder.chmod(0o711)
    with (
        open_interpreter(),
        small_server(tmp_path, level="landlock") as server,
        runner(server.url) as execute,
    ):
        directory = Path(execute(code).stdout.strip())
        assert directory.is_relative_to(tmp_path)
        wait_until(lambda: _left_in(directory) == [], "its directory to be empty", scaled(10))
        assert execute("import os; print(os.listdir())").stdout == "[]\n"
        assert health(server.url)["restarts"] == 0  # by the worker itself, not by the end of one that found it there
    assert Path("/usr/bin").exists()
    assert list(tmp_path.glob("ctpo-sandbox-*")) == []
