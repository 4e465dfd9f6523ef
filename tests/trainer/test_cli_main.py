"""The command line: exit codes, what is imported, what is printed, and what happens when all goes wrong."""

import errno
import json
import re
import signal
import subprocess
import sys
import types
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from config_helpers import DATA, write
from fork_server import ForkServer
from tiers import extra, full_only

from stoker.trainer.cli import doctor, main
from stoker.trainer.config import render
from stoker.trainer.config.nemo.key_table import key_table
from stoker.trainer.config.schema.key_index import schema_keys
from stoker.trainer.utils import environment
from stoker.trainer.utils.errors import UserError, save_traceback
from stoker.trainer.utils.signals import TERMINATION_SIGNALS, restore_handlers

ROOT = Path(__file__).resolve().parents[2]
Captured = pytest.CaptureFixture[str]


def run(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "stoker", *arguments], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def test_torch_waits_for_a_valid_configuration(tmp_path: Path) -> None:
    """One process runs the commands one after the other: what one of them imports is there for the next ones."""
    commands = {
        "--help": 0,
        "train --help": 0,
        "config model=gpt_125m": 0,
        "config --schema": 0,
        "train model.num_laers=3": 2,
        "train model=nope": 2,
        "trian": 2,
    }
    heavy = ["torch", "lightning", "pytorch_lightning", "numpy", "triton", "rich", "transformers", "tensorboard"]
    script = (
        "import sys\nfrom stoker.trainer.cli.main import main\n"
        f"for command in {list(commands)}:\n"
        "    try: code = main(command.split())\n"
        "    except SystemExit as end: code = end.code or 0\n"
        f"    print('\\nran', command, code, sorted(set({heavy}) & set(sys.modules)), flush=True)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], cwd=tmp_path, capture_output=True, text=True, timeout=600, check=False
    )
    found = [line for line in done.stdout.splitlines() if line.startswith("ran ")]
    assert found == [f"ran {command} {code} []" for command, code in commands.items()], done.stderr


@full_only
def test_training_imports_none_of_the_large_libraries_that_it_does_not_use() -> None:
    """Also where they are installed, as they are here: Lightning's torchmetrics would."""
    large = ["transformers", "matplotlib", "scipy", "sklearn", "pandas", "torchvision", "datasets", "peft"]
    server = ForkServer()  # that of the other tests has imported what pytest has
    try:
        assert server.call("fork_server", "imported", large) == [[], True], "matplotlib is available again afterwards"
    finally:
        server.close()


def test_python_m_and_the_console_script_are_one(tmp_path: Path) -> None:
    done = run("config", "model.num_laers=3", "--json", cwd=tmp_path)
    assert done.returncode == 2
    assert "did you mean model.num_layers?" in done.stderr
    assert json.loads(done.stdout)["problems"][0]["key"] == "model.num_laers"
    assert "Traceback" not in done.stderr


def test_overview_and_wrong_verbs(capsys: Captured) -> None:
    assert main.main([]) == 2
    assert main.main(["--help"]) == 0
    out = capsys.readouterr().out
    assert all(verb in out for verb in main.VERBS)
    assert main.main(["trian"]) == 2
    assert "did you mean `stoker train`?" in capsys.readouterr().err
    assert main.main(["model=gpt_tiny"]) == 2
    assert "did you mean `stoker train`?" in capsys.readouterr().err
    assert main.main(["--version"]) == 0


def test_config_prints_values_with_origins(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    write(tmp_path, "conf/model/mine", "num_layers: 3\nmcore_gpt: true\n")
    assert main.main(["config", "model=mine", "trainer.max_steps=5", "--config-dir", "conf"]) == 0
    out, err = capsys.readouterr()
    assert re.search(r"^  num_layers: 3 +# conf/model/mine.yaml:1$", out, re.MULTILINE)
    assert re.search(r"^  max_steps: 5 +# trainer.max_steps=5 \(command line\)$", out, re.MULTILINE)
    assert re.search(r"^  hidden_size: 768 +# default$", out, re.MULTILINE)
    assert re.search(r"^  family: gpt +# default; own key$", out, re.MULTILINE)
    assert re.search(r"^#   model.mcore_gpt: true +historical +conf/model/mine.yaml:2", out, re.MULTILINE)
    assert "1 key of NeMo without effect here" in err


def test_config_prints_a_file_that_can_be_used(
    capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = ["model=llama_1b", "name='a: b # c'", "env_vars.A='1'", "exp_manager.version='7'"]
    assert main.main(["config", *overrides]) == 0
    write(tmp_path, "again", capsys.readouterr().out)
    assert main.main(["config", *overrides, "--json"]) == 0
    first = json.loads(capsys.readouterr().out)
    assert main.main(["config", "--json", "--config-dir", ".", "--config-name", "again"]) == 0
    again = json.loads(capsys.readouterr().out)
    assert first["valid"]
    assert again["digest"] == first["digest"]
    assert again["keys"]["model.num_layers"]["origin"].startswith("again.yaml:")


def test_config_accounts_for_every_key_even_with_errors(capsys: Captured) -> None:
    arguments = [
        "config",
        "--config-dir",
        str(DATA),
        "--config-name",
        "nemo_style_gpt",
        "model.data.data_prefix=[]",
        "model.data.index_mapping_dir=null",
        "model.fp8_recipe=mxfp8",
        "model.nope=1",
    ]
    assert main.main([*arguments, "--json"]) == 2
    out, err = capsys.readouterr()
    told = json.loads(out)
    assert not told["valid"]
    assert {problem["key"] for problem in told["problems"]} == {"model.fp8_recipe", "model.nope"}
    assert told["keys"]["model.nope"]["state"] == "unknown"
    assert told["keys"]["model.pre_process"]["state"] == "historical"
    assert set(schema_keys()) - {"env_vars"} <= set(told["keys"])
    assert "2 errors in the configuration" in err
    assert main.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines()[-1] == "2 errors in the configuration; nothing was started"


def test_json_schema_knows_every_key(capsys: Captured) -> None:
    assert main.main(["config", "--schema"]) == 0
    schema = json.loads(capsys.readouterr().out)

    def definition(block: dict[str, Any]) -> dict[str, Any]:
        return schema["definitions"][block["$ref"].rpartition("/")[2]] if "$ref" in block else block

    for path in schema_keys():
        block = schema
        for name in path.split("."):
            block = definition(definition(block)["properties"][name])
    model = definition(definition(schema["properties"]["model"]))["properties"]
    assert definition(model["mcore_gpt"])["description"].startswith("historical")
    assert definition(model["num_layers"])["pattern"] == r"\$\{|^\?\?\?$"


def test_all_lists_every_key(capsys: Captured) -> None:
    assert main.main(["config", "--all"]) == 0
    listed = {line.split()[0] for line in capsys.readouterr().out.splitlines()}
    assert listed == set(schema_keys()) | set(key_table())


def test_the_docs_page_is_current() -> None:
    page = (ROOT / "docs" / "configuration.md").read_text()
    assert page == render.as_docs_page(), "run: stoker config --docs > docs/configuration.md"


def failing(error: BaseException) -> Any:
    def fail(*_: object) -> int:
        raise error

    return fail


def test_a_bug_leaves_a_file_and_one_line(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "_config", failing(RuntimeError("broken\nin two lines")))
    assert main.main(["config", "model=x"]) == 1
    (file,) = tmp_path.glob("stoker-crash-*.txt")
    err = capsys.readouterr().err
    assert err.splitlines() == [
        f"internal error in stoker: RuntimeError: broken in two lines; the traceback is in {file.name}"
    ]
    assert "Traceback" in file.read_text()
    assert "stoker config model=x" in file.read_text()


def wrapping(error: BaseException) -> RuntimeError:
    """The error that Python 3.11 raises when Ctrl-C interrupts a `__set_name__`, as during the import of Hydra."""
    wrapper = RuntimeError("Error calling __set_name__ on 'Field' instance 'parent_base_dir' in 'InputDefault'")
    wrapper.__cause__ = error
    return wrapper


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError(["one", "two"], 2), 2, "one\ntwo"),
        (UserError("full", 74), 74, "full"),
        (KeyboardInterrupt(), 130, "interrupted"),
        (wrapping(KeyboardInterrupt()), 130, "interrupted"),
        (OSError(errno.EMFILE, "Too many open files"), 74, "too many open files for the limit of this process ("),
        (OSError(errno.ENAMETOOLONG, "File name too long", "x" * 300), 2, "x...: no name in a path may be longer than"),
        (OSError(errno.ENOSPC, "No space left on device", "/x"), 74, "/x: No space left on device"),
        (OSError(errno.EROFS, "Read-only file system"), 74, "Read-only"),
    ],
)
def test_exit_codes(
    error: BaseException, code: int, says: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(main, "_config", failing(error))
    assert main.main(["config"]) == code
    assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "override",
    [
        "exp_manager.wandb_logger_kwargs.api_key=hush",
        "env_vars.API_KEY=hush",
        "+env_vars={API_KEY: hush, B: 1}",
        "exp_manager.mlflow_logger_kwargs.tracking_uri=http://me:hush@host",
        "no.such.secret='hush hush'",
        "my.password=(hush",
        "env_vars.authToken=hush",
        "env_vars.GITHUB_PAT=[hush]",
        "+env_vars={DB_PASS: hush, B: 1}",
        "env_vars.URL='https://host/x?token=hush'",
        "env_vars.HOME_PASSPHRASE=hush",
    ],
)
def test_a_refused_secret_is_not_shown(override: str, capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME_PASSPHRASE", "hush, another")
    for form in ([], ["--json"]):
        assert main.main(["config", "exp_manager.create_mlflow_logger=true", override, *form]) == 2
        out, err = capsys.readouterr()
        assert "hush" not in out + err
        assert "***" in err


def test_a_crash_file_holds_no_secret(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(main, "_config", failing(RuntimeError("x")))
    assert main.main(["config", "a.api_key=hush", "b=1"]) == 1
    (file,) = tmp_path.glob("stoker-crash-*.txt")
    assert "stoker config a.api_key=*** b=1" in file.read_text()


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    done = subprocess.run(
        ["bash", "-c", f"{sys.executable} -m stoker config --all | head -1; echo ${{PIPESTATUS[0]}}"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.stdout.splitlines()[-1] == "0"
    assert done.stderr == ""


def test_train_sets_env_vars_and_hands_over(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    seen: dict[str, Any] = {}

    def train(config: Any) -> int:
        seen["steps"], seen["flag"] = config.root.trainer.max_steps, os.environ.get("STOKER_TEST_FLAG")
        return 143

    monkeypatch.setitem(sys.modules, "stoker.trainer.train", types.SimpleNamespace(train=train))
    monkeypatch.setenv("STOKER_TEST_FLAG", "1")
    assert main.main(["train", "trainer.max_steps=3", "env_vars.STOKER_TEST_FLAG=true"]) == 143
    assert seen == {"steps": 3, "flag": "1"}
    assert main.main(["train", "env_vars.STOKER_TEST_FLAG=2"]) == 2
    assert "contradicts the environment" in capsys.readouterr().err


def test_a_sigterm_when_no_process_is_left_ends_with_143(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between two starts of a run, or after the last process: no handler of the launcher is there."""
    ended: list[int] = []
    monkeypatch.setattr("stoker.trainer.utils.signals.os._exit", ended.append)
    words = ["trainer.accelerator=cpu", "trainer.devices=2", "model.micro_batch_size=8"]
    monkeypatch.setattr(sys, "argv", ["stoker", "train", *words])
    before: dict[int, Any] = {number: signal.getsignal(number) for number in TERMINATION_SIGNALS}

    def launch(config: Any, placement: Any, imports: Any) -> int:
        signal.raise_signal(signal.SIGTERM)
        return 0

    monkeypatch.setattr("stoker.trainer.distributed.launcher.launch", launch)
    try:
        main.main()
    finally:
        signal.set_wakeup_fd(-1)
        restore_handlers(before)
    assert ended == [143]


def test_code_of_the_users_own_runs_where_env_vars_are_set_already(
    capsys: Captured, monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[tuple[int, list[str]]] = []

    def launch(config: Any, placement: Any, imports: list[str]) -> int:
        launched.append((placement.world_size, imports))
        return 0

    monkeypatch.setattr("stoker.trainer.distributed.launcher.launch", launch)
    assert main.main(["train", "--import", "string", "env_vars.STOKER_TEST_FLAG=1"]) == 0
    assert launched == [(1, ["string"])]
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "first", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    result = SimpleNamespace(exit_code=7)
    monkeypatch.setattr("stoker.trainer.train.train_as_rank", lambda config, placement: result)
    monkeypatch.setenv("STOKER_TEST_FLAG", "1")
    words = ["train", "--import", "string", "trainer.accelerator=cpu", "trainer.devices=2", "model.micro_batch_size=8"]
    assert main.main([*words, "env_vars.STOKER_TEST_FLAG=1"]) == 7
    assert "--import" not in capsys.readouterr().err
    monkeypatch.delenv("STOKER_TEST_FLAG")
    assert main.main([*words, "env_vars.STOKER_TEST_FLAG=1"]) == 7
    assert "after the modules of --import: STOKER_TEST_FLAG" in capsys.readouterr().err


def test_doctor_reports_and_never_fails(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NVTE_FLASH_ATEN", "0")

    def broken() -> list[doctor.Finding]:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "CHECKS", (*doctor.CHECKS, broken))
    assert main.main(["doctor", "--json"]) == 0
    told = {line["what"]: line for line in json.loads(capsys.readouterr().out)}
    assert {"Python", "torch", "CPU", "threads", "disk", "packages"} <= told.keys()
    assert "did you mean NVTE_FLASH_ATTN?" in told["flag"]["says"]
    assert told["broken"]["level"] == "warning"
    assert main.main(["doctor"]) == 0
    assert capsys.readouterr().out.startswith("Python")


def test_doctor_without_torch(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    assert main.main(["doctor"]) == 1
    assert "pip install torch" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("typed", "what", "fix"),
    [
        (["convert", "a"], "missing: TARGET", "write stoker convert SOURCE TARGET"),
        (["preprocess", "a"], "missing: --output-prefix", "write stoker preprocess INPUT --output-prefix P"),
        (["generate", "--chekpoint", "x"], "unknown: --chekpoint", "did you mean --checkpoint?"),
        (["plan", "--arch", "sm9"], "unknown: --arch", "did you mean --device GPU?"),
        (
            ["explain", "attention", "--arch", "sm9"],
            "argument --arch: invalid choice: 'sm9'",
            "did you mean --arch sm90?",
        ),
        (["convert", "x", "--to", "hff"], "argument --to: invalid choice: 'hff'", "did you mean --to hf?"),
        (
            ["train", *(f"--no-{n}" for n in range(40))],
            "unknown: --no-0 --no-1",
            "`stoker train --help` lists the options",
        ),
        (["evaluate", "--what", "a b"], "unknown: --what", "`stoker evaluate --help` lists the options"),
        (["plan", "--device"], "argument --device: expected one argument", "`stoker plan --help` lists the options"),
        (["plan", "--trainer.max_steps=9"], "unknown: --trainer.max_steps=9", "write trainer.max_steps=9"),
        (["plan", "--trainer.max_steps", "9"], "unknown: --trainer.max_steps", "write trainer.max_steps=9"),
        (["train", "--num_layers=3"], "unknown: --num_layers=3", "write model.num_layers=3"),
        (["train", "--cfg", "jobb"], "argument -c/--cfg: invalid choice: 'jobb'", "did you mean --cfg job?"),
        (["train", "--hydra-help"], "unknown: --hydra-help", "`stoker VERB --help` lists the options"),
        (["doctor", "--my.password=hush"], "unknown: --my.password=***", "`stoker doctor --help` lists the options"),
        (["config", "--json", "--all"], "argument --all: not allowed with argument --json", "`stoker config --help`"),
    ],
)
def test_a_wrong_option_is_one_line_and_the_way_out(typed: list[str], what: str, fix: str, capsys: Captured) -> None:
    assert main.main(typed) == 2
    out, err = capsys.readouterr()
    first, second = err.splitlines()
    assert (out, first.startswith(f"stoker {typed[0]}: {what}")) == ("", True)
    assert second.startswith(f"    fix: {fix}")


def test_an_empty_name_is_not_the_default(capsys: Captured) -> None:
    assert main.main(["config", "--config-name", ""]) == 2
    assert "there is no such file" in capsys.readouterr().err


def test_a_current_directory_that_is_gone(capsys: Captured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main.main(["config"]) == 2
    assert capsys.readouterr().err == "the current directory no longer exists; change to one that does\n"


def test_a_home_that_does_not_exist(capsys: Captured, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("STOKER_CONF", "~nobody.at.all/conf")
    assert main.main(["config"]) == 2
    assert "STOKER_CONF" in capsys.readouterr().err


def test_waiting_threads_spin_briefly_unless_the_caller_has_a_wish(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, expected in (({}, "10000"), ({"GOMP_SPINCOUNT": "7"}, "7"), ({"OMP_WAIT_POLICY": "ACTIVE"}, None)):
        variables: dict[str, str] = dict(given)
        monkeypatch.setattr(environment.os, "environ", variables)
        environment.prepare_process({"A": True})
        assert variables.get("GOMP_SPINCOUNT") == expected
        assert variables["A"] == "1"


def test_segments_of_device_memory_grow_unless_the_caller_has_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    grown = {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    own = {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:512"}
    for platform, given, asked, expected in (
        ("linux", {}, {}, grown),
        ("linux", own, {}, own),
        ("linux", {}, own, own),
        ("win32", {}, {}, {}),
    ):
        variables: dict[str, str] = dict(given)
        monkeypatch.setattr(environment.os, "environ", variables)
        monkeypatch.setattr(environment.sys, "platform", platform)
        environment.prepare_process(asked)
        assert {name: value for name, value in variables.items() if "ALLOC" in name} == {**given, **asked}
        environment.enable_expandable_segments()
        assert {name: value for name, value in variables.items() if "ALLOC" in name} == expected
        assert variables["NCCL_GRAPH_REGISTER"] == "0"


def test_errors_quote_no_terminal_sequence(capsys: Captured) -> None:
    assert main.main(["generate", "a\x1b[31m\u202eb\nc"]) == 2
    err = capsys.readouterr().err
    assert "a\\x1b[31m\\u202eb\nc" in err


def test_processes_that_crash_in_the_same_second_keep_a_trace_each(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("time.strftime", lambda form: "stoker-crash-now")
    first, second = save_traceback("the cause"), save_traceback("lost another rank")
    assert first is not None
    assert second is not None
    assert (first.read_text(), second.read_text()) == ("the cause", "lost another rank")


def test_a_long_list_of_errors_is_cut(capsys: Captured, tmp_path: Path) -> None:
    (tmp_path / "many.yaml").write_text("model:\n" + "".join(f"  wrong_{n}: 1\n" for n in range(300)))
    assert main.main(["config", "--config-dir", str(tmp_path), "--config-name", "many"]) == 2
    *lines, more, total = capsys.readouterr().err.splitlines()
    assert (len(lines), more) == (150, "and 250 more")
    assert total == "300 errors in the configuration; nothing was started"
    assert main.main(["train", *(f"--wrong-{n}" for n in range(300))]) == 2
    assert "--wrong-9 and 290 more" in capsys.readouterr().err
    assert main.main(["config", *(f"model.seed={n}" for n in range(300))]) == 0
    assert "model.seed=9, and 289 more, given before it" in capsys.readouterr().err


@pytest.mark.parametrize("entry", ["stoker", *extra("stoker.trainer")])
@pytest.mark.parametrize("module", ["stoker.trainer.cli.main", "stoker.trainer.config.load"])  # before main, in main
def test_ctrl_c_while_modules_are_imported_is_no_traceback(entry: str, module: str) -> None:
    program = f"""if 1:
        import os, runpy, signal, sys

        class Finder:
            def find_spec(self, name, path=None, target=None):
                if name == {module!r}:
                    exec("os.kill(os.getpid(), signal.SIGINT)")  # its mark must not replace the exit code

        sys.meta_path.insert(0, Finder())
        sys.argv = ["stoker", "config"]
        runpy.run_module({entry!r}, run_name="__main__")
    """
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr in ("", "interrupted\n")
