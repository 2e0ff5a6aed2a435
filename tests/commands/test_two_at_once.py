"""Two commands on one folder: the second is refused before it does anything, and spoils nothing."""

from pathlib import Path

import pytest

from g2rpo_ray.cli import main
from g2rpo_ray.common.errors import InputError
from g2rpo_ray.common.files import sole_writer
from g2rpo_ray.tiny_world import assets_dir
from tests.disks import left
from tests.states import make_run
from tests.tiny import QUICKSTART

COMMANDS: dict[str, list[object]] = {
    "sample": ["RUN", "--prompt", "a cat", "--out", "OUT"],
    "evaluate": ["RUN", "--out", "OUT"],
    "score": ["PICTURES", "--config", "RUN", "--out", "OUT"],
    "embed": [QUICKSTART, assets_dir() / "prompts" / "heldout.txt", "--out", "OUT"],
}


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_run(tmp_path_factory.mktemp("two") / "run").run_dir


@pytest.mark.parametrize("command", COMMANDS)
def test_a_folder_that_another_command_writes_is_refused(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], command: str
) -> None:
    out, pictures = tmp_path / "out", tmp_path / "pictures"
    pictures.mkdir()
    (pictures / "0.png").touch()
    named = {"RUN": run_dir, "OUT": str(out), "PICTURES": str(pictures)}
    arguments = [named.get(str(word), str(word)) for word in COMMANDS[command]]
    with sole_writer(out, InputError, "--out"):
        assert main([command, *arguments]) == 2
    assert f"--out {out}: another command writes there now; wait" in capsys.readouterr().err
    assert not left(out)


def test_of_two_exports_to_one_folder_the_second_leaves_the_first_whole(
    run_dir: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    writing, command = tmp_path / ".out.writing", ["export", run_dir, "--to", str(tmp_path / "out")]
    writing.mkdir()
    (writing / "half.safetensors").touch()
    with sole_writer(writing, InputError, "--to"):
        assert main(command) == 2
        assert f"--to {writing}: another command writes there now" in capsys.readouterr().err
        assert left(writing) == {"half.safetensors"}
    # Nobody's any more: what a killed export left.
    assert main(command) == 0
    files = {"README.md", "config.json", "diffusion_pytorch_model.safetensors"}
    assert left(tmp_path) == {f"out/{name}" for name in files}
