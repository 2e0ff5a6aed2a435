"""g2rpo download against a server that speaks the hub's API."""

import json
import shutil
import threading
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from huggingface_hub import HfApi, constants, errors

from g2rpo_ray.cli import EXIT_INTERRUPTED, main
from g2rpo_ray.common.files import DiskError
from g2rpo_ray.config import load_config
from g2rpo_ray.models.catalogue import CATALOGUE, DownloadError, targets_of
from g2rpo_ray.models.download import OfflineError, download
from g2rpo_ray.run.paths import SETTINGS, VERSIONS
from tests.commands.hub_server import Hub, Repository, serve

CONFIGS = Path(__file__).parents[2] / "configs"
FLUX, HPS, CLIP = (
    CATALOGUE[name] for name in ("FLUX.1-dev", "HPS_v2.1_compressed.pt", "DFN5B-CLIP-ViT-H-14")
)
FLUX_FILES = {
    "model_index.json": b"{}",
    "scheduler/scheduler_config.json": b"{}",
    "transformer/config.json": b'{"a": 1}',
    "transformer/diffusion_pytorch_model.safetensors": bytes(range(256)) * 40,
    "text_encoder/model.safetensors": b"clip" * 400,
    "text_encoder_2/model.safetensors": b"t5" * 400,
    "tokenizer/merges.txt": b"a b",
    "tokenizer_2/spiece.model": b"spiece",
    "vae/config.json": b"{}",
    "flux1-dev.safetensors": b"the same weights in one file" * 100,
    "README.md": b"words",
}
USED = [name for name in FLUX_FILES if "/" in name or name == "model_index.json"]


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Hub]:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf_home"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serve() as served:
        use(monkeypatch, served.url)
        served.repositories = {
            FLUX.repo: Repository(FLUX.revision or "", dict(FLUX_FILES)),
            HPS.repo: Repository(
                HPS.revision or "",
                {"HPS_v2.1_compressed.pt": b"hps" * 5000, "HPS_v2_compressed.pt": b"old" * 5000},
            ),
            CLIP.repo: Repository(
                "c" * 40,
                {
                    "open_clip_config.json": b"{}",
                    "open_clip_pytorch_model.bin": b"pickle" * 900,
                    "open_clip_model.safetensors": b"safe" * 900,
                    "pytorch_model.bin": b"transformers" * 900,
                },
            ),
        }
        yield served


def use(monkeypatch: pytest.MonkeyPatch, url: str) -> None:
    """As HF_ENDPOINT does; the library reads that when it is imported."""
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


def config(name: str = "flux_g2rpo_hps_clip") -> Path:
    return CONFIGS / f"{name}.yaml"


def run(*arguments: str) -> int:
    return main(["download", str(config()), *arguments])


def fetch(*also: str, name: str = "flux_g2rpo_hps_clip") -> None:
    download(load_config(config(name)), also)


def test_only_the_files_that_are_used_come_into_the_folders_that_are_expected(
    server: Hub, tmp_path: Path
) -> None:
    fetch()
    models = tmp_path / "models"
    for name in USED:
        assert (models / "FLUX.1-dev" / name).read_bytes() == FLUX_FILES[name]
    assert not (models / "FLUX.1-dev" / "flux1-dev.safetensors").exists()
    assert (models / "HPS_v2.1_compressed.pt").read_bytes() == b"hps" * 5000
    assert not (models / "HPS_v2_compressed.pt").exists()
    clip = models / "DFN5B-CLIP-ViT-H-14"
    assert {p.name for p in clip.iterdir() if not p.name.startswith(".")} == {
        "open_clip_config.json",
        "open_clip_model.safetensors",
    }
    before = len(server.fetched())
    fetch()
    assert len(server.fetched()) == before


def test_a_dry_run_lists_files_and_sizes_and_fetches_nothing(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("--dry-run") == 0
    printed = capsys.readouterr().out
    assert f"{FLUX.repo} at {FLUX.revision}: {len(USED)} files" in printed
    assert "to fetch" in printed
    assert "10 kB  transformer/diffusion_pytorch_model.safetensors" in printed
    assert server.fetched() == []
    assert not (tmp_path / "models").exists()


def test_a_broken_connection_goes_on_where_it_broke(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # The library keeps whole chunks, of 10 MB else.
    monkeypatch.setattr("huggingface_hub.constants.DOWNLOAD_CHUNK_SIZE", 1024)
    server.cut_after = 6000
    fetch()
    name = "transformer/diffusion_pytorch_model.safetensors"
    first, again = (request for request in server.fetched() if name in request)
    assert "bytes=" not in first
    assert again.endswith("bytes=5120-")
    assert (tmp_path / "models" / "FLUX.1-dev" / name).read_bytes() == FLUX_FILES[name]


def test_ctrl_c_ends_it_at_once_and_the_same_command_goes_on(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.interrupts = True
    assert run() == EXIT_INTERRUPTED
    assert "whole files stay; the same command fetches the others" in capsys.readouterr().out
    assert not list(tmp_path.rglob("*.incomplete"))
    assert run() == 0


def test_a_file_that_is_not_what_the_list_says_is_removed_and_named(
    server: Hub, tmp_path: Path
) -> None:
    server.corrupt = True
    with pytest.raises(DownloadError, match=r"model_index\.json: its checksum is not the one"):
        fetch()
    assert not (tmp_path / "models" / "FLUX.1-dev" / "model_index.json").exists()
    server.corrupt = False
    fetch()


@pytest.mark.parametrize("name", ["transformer/config.json", "text_encoder/model.safetensors"])
def test_a_file_that_was_damaged_on_the_disk_is_fetched_again(
    server: Hub, tmp_path: Path, name: str
) -> None:
    fetch()
    path = tmp_path / "models" / "FLUX.1-dev" / name
    path.write_bytes(FLUX_FILES[name][:-1] + b"?")
    before = len(server.fetched())
    fetch()
    assert path.read_bytes() == FLUX_FILES[name]
    assert len(server.fetched()) == before + 1


def test_a_gated_model_says_what_to_accept_and_where_the_token_goes(
    server: Hub, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repositories[FLUX.repo].gated = True
    assert run() == 2
    printed = capsys.readouterr().err
    assert f"{FLUX.repo} is gated: accept FLUX.1 [dev]'s non-commercial licence" in printed
    assert f"{server.url}/{FLUX.repo}" in printed
    assert "HF_TOKEN" in printed
    assert "Traceback" not in printed


def test_the_token_opens_the_gate_and_is_neither_printed_nor_kept(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    server.repositories[FLUX.repo].gated = True
    monkeypatch.setenv("HF_TOKEN", server.token)
    assert run() == 0
    server.status = 500
    assert run() == 2
    printed = capsys.readouterr()
    assert "the hub answered with status 500" in printed.err
    assert server.token not in printed.out + printed.err
    for path in tmp_path.rglob("*"):
        assert path.is_dir() or server.token.encode() not in path.read_bytes()


def test_a_wrong_token_is_said_and_not_printed(
    server: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert server.token != "hf_of_yesterday"
    monkeypatch.setenv("HF_TOKEN", "hf_of_yesterday")
    assert run() == 2
    printed = capsys.readouterr()
    assert "status 401; the token (HF_TOKEN or 'hf auth login') is not valid" in printed.err
    assert "hf_of_yesterday" not in printed.out + printed.err


def test_a_hub_that_fails_after_the_list_is_said(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        server.status = 500

    monkeypatch.setattr("g2rpo_ray.models.download._check_disks", fail)
    monkeypatch.setattr("time.sleep", lambda _: None)  # the library tries again, and waits
    with pytest.raises(DownloadError, match=f"{FLUX.repo}: the hub answered with status 500"):
        fetch()


def test_a_second_file_is_asked_for_before_the_first_is_there(server: Hub) -> None:
    server.another = threading.Event()
    fetch()
    assert server.another.is_set()
    assert not server.waited_in_vain


def test_the_disk_is_compared_before_anything_is_fetched(
    server: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=20_000))
    with pytest.raises(DiskError, match=r"what is to come takes \d+ kB, and 20 kB are free"):
        fetch()
    assert server.fetched() == []


def test_a_damaged_file_gives_its_room_to_the_one_that_replaces_it(
    server: Hub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetch()
    before, name = len(server.fetched()), "text_encoder/model.safetensors"
    path = tmp_path / "models" / "FLUX.1-dev" / name
    path.write_bytes(FLUX_FILES[name][:-1] + b"?")
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=0))
    fetch()
    assert path.read_bytes() == FLUX_FILES[name]
    path.unlink()
    with pytest.raises(DiskError, match="what is to come takes"):
        fetch()
    assert len(server.fetched()) == before + 1


def test_a_model_without_a_pin_stays_at_its_first_commit(server: Hub, tmp_path: Path) -> None:
    assert CLIP.revision is None
    fetch()
    record = tmp_path / "models/DFN5B-CLIP-ViT-H-14/.DFN5B-CLIP-ViT-H-14.g2rpo-download.json"
    assert json.loads(record.read_text())["commit"] == "c" * 40
    server.requests.clear()
    fetch()
    assert any(f"/revision/{'c' * 40}" in request for request in server.requests)


def test_a_pin_that_is_gone_is_said(server: Hub) -> None:
    server.repositories[HPS.repo].commit = "d" * 40
    with pytest.raises(
        DownloadError, match=rf"{HPS.repo}: the pinned commit {HPS.revision} is not"
    ):
        fetch()


def test_a_repository_that_is_gone_is_said(server: Hub) -> None:
    del server.repositories[FLUX.repo]
    with pytest.raises(DownloadError, match=f"{FLUX.repo}: not found"):
        fetch()


@pytest.mark.usefixtures("server")
def test_offline_local_folders_are_enough_and_what_is_missing_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fetch()
    use(monkeypatch, "http://127.0.0.1:9")
    assert run() == 0
    assert "everything that was downloaded is in place" in capsys.readouterr().out
    (tmp_path / "models/FLUX.1-dev/vae/config.json").unlink()
    shutil.rmtree(tmp_path / "models/DFN5B-CLIP-ViT-H-14")
    assert run() == 2
    printed = capsys.readouterr().err
    assert f"{tmp_path}/models/FLUX.1-dev/vae/config.json (model.path, {FLUX.repo})" in printed
    assert "models/DFN5B-CLIP-ViT-H-14 (rewards.clip.options.architecture" in printed
    assert "HPS" not in printed


@pytest.mark.usefixtures("server")
def test_that_the_hub_is_not_asked_by_the_users_own_wish_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert run() == 2
    assert "HF_HUB_OFFLINE is set, so http://127.0.0.1" in capsys.readouterr().err


@pytest.mark.usefixtures("server")
def test_a_folder_put_there_by_hand_is_looked_at_offline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, "http://127.0.0.1:9")
    flux = tmp_path / "models" / "FLUX.1-dev"
    for name in set(USED) - {"vae/config.json"}:
        (flux / name).parent.mkdir(parents=True, exist_ok=True)
        (flux / name).write_bytes(FLUX_FILES[name])
    with pytest.raises(OfflineError) as caught:
        fetch()
    assert f"{flux}/vae/* (model.path" in str(caught.value)
    assert "transformer" not in str(caught.value)


@pytest.mark.parametrize("name", ["ConnectTimeout", "ReadError", "RemoteProtocolError"])
def test_whatever_keeps_the_librarys_client_from_the_hub_is_no_connection(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    # Of the client that the installed version has: httpx, or httpx2.
    client = import_module(errors.HfHubHTTPError.__mro__[1].__module__.partition(".")[0])

    def fail(*_: object, **__: object) -> None:
        raise getattr(client, name)("gone")

    monkeypatch.setattr(HfApi, "model_info", fail)
    with pytest.raises(OfflineError, match=r"no connection to http.* are missing or damaged"):
        fetch()


def test_published_weights_come_on_request(server: Hub, tmp_path: Path) -> None:
    weights = b"weights" * 500
    server.repositories["yujieouo/G2RPO"] = Repository(
        "e" * 40, {"diffusion_pytorch_model.safetensors": weights, "config.json": b"{}"}
    )
    fetch("models/G2RPO")
    folder = tmp_path / "models" / "G2RPO"
    assert (folder / "diffusion_pytorch_model.safetensors").read_bytes() == weights
    with pytest.raises(DownloadError, match="--also models/G3RPO: not known"):
        fetch("models/G3RPO")


@pytest.mark.parametrize("states", ["checkpoints", "snapshots"])
def test_nothing_comes_among_a_runs_checkpoints(
    server: Hub, tmp_path: Path, states: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in (SETTINGS, VERSIONS):
        (tmp_path / name).touch()
    model = tmp_path / states / "FLUX.1-dev"
    assert run(f"model.path={model}") == 2
    assert f"model.path {model}: lies in {model.parent}" in capsys.readouterr().err
    assert run("--also", str(tmp_path / states / "G2RPO"), "--dry-run") == 2
    assert f"--also {tmp_path / states / 'G2RPO'}: lies in" in capsys.readouterr().err
    assert server.requests == []
    assert not model.parent.exists()


def test_a_path_that_nobody_knows_is_named(server: Hub) -> None:
    mine = load_config(config(), ["model.path=models/my-flux"])
    with pytest.raises(
        DownloadError, match=r"model\.path .*my-flux: does not exist, and not known"
    ):
        download(mine)
    assert server.requests == []


def test_the_quickstart_needs_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["download", str(config("quickstart"))]) == 0
    assert "needs nothing" in capsys.readouterr().out


def test_a_judges_model_and_words_are_no_files(capsys: pytest.CaptureFixture[str]) -> None:
    judge = (
        "{kind: judge, weight: 0, options: {url: 'http://j/v1', model: Qwen/Qwen2.5-VL-7B, "
        "template: '{prompt} and/or'}}"
    )
    assert main(["download", str(config("quickstart")), f"rewards.taste={judge}"]) == 0
    assert "needs nothing" in capsys.readouterr().out


@pytest.mark.parametrize("path", sorted(CONFIGS.glob("flux_*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_names_known_models_only(path: Path) -> None:
    targets = targets_of(load_config(path))
    assert [target.setting for target in targets if target.source is None] == []
    assert "model.path" in {target.setting for target in targets}


def test_pins_are_whole_commits() -> None:
    pinned = [source.revision for source in CATALOGUE.values() if source.revision]
    assert len(pinned) >= 6
    assert all(len(pin) == 40 and int(pin, 16) for pin in pinned)


@pytest.mark.parametrize(
    "name", ["DFN5B-CLIP-ViT-H-14", "DFN5B-CLIP-ViT-H-14-384", "DFN5B-CLIP-ViT-H-14-378"]
)
def test_all_names_of_apples_clip_are_known(name: str) -> None:
    override = f"rewards.clip.options.architecture=local-dir:models/{name}"
    sources = [target.source for target in targets_of(load_config(config(), [override]))]
    assert f"apple/{name}" in [source.repo for source in sources if source is not None]
