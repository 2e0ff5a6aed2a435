"""Several raylets as nodes, with token authentication: job submission and the doctor."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster.raylets import Raylets, end_tree, raylets
from tests.integration.command import ROOT
from tests.tiny import SMALL

pytestmark = pytest.mark.long

CHECKS = {
    "cluster", "authentication", "room", "versions", "gpus", "memory", "object store",
    "shared memory", "open files", "clock", "gloo", "dashboard", "metrics", "storage", "space",
    "models",
}  # fmt: skip


@pytest.fixture(scope="module")
def cluster() -> Iterator[Raylets]:
    """A head and a worker of two CPUs each."""
    with raylets(("--num-cpus=2",)) as running:
        running.start(f"--address={running.address}", "--num-cpus=2", "--labels=zone=second")
        yield running


SETTINGS = (
    "configs/quickstart.yaml",
    *SMALL,
    "iterations=1",
    "rollout.workers=1",
    "rollout.label_selector={zone: second}",
    "learner.ranks=1",
    "cluster.min_nodes=2",
    "rewards={clip: {kind: clip, cpus_per_replica: 0.1, "
    "options: {architecture: 'local-dir:tiny_world:clip'}}}",
)


def doctor(
    cluster: Raylets, *arguments: str, **environment: str
) -> tuple[int, dict[str, str], dict[str, str], str]:
    """Exit code, worst level and all findings by check, and the text."""
    file = cluster.folder / "doctor.json"
    ended = cluster.run(
        "-m", "g2rpo_ray.cli", "doctor", *arguments, "--json", str(file), **environment
    )
    assert file.exists(), ended.stdout
    findings = json.loads(file.read_text())["findings"]
    file.unlink()
    levels: dict[str, str] = {}
    texts: dict[str, str] = {}
    order = ["OK", "WARN", "FAIL"]
    for finding in findings:
        check = finding["check"]
        levels[check] = max(levels.get(check, "OK"), finding["level"], key=order.index)
        texts[check] = f"{texts.get(check, '')}\n{finding['what']} -> {finding['remedy']}"
    print(ended.stdout)
    return ended.returncode, levels, texts, ended.stdout


def submission(run_dir: Path) -> tuple[str, ...]:
    config, *overrides = SETTINGS
    return (config, str(run_dir), *overrides)


def submit(cluster: Raylets, *arguments: str, **environment: str) -> tuple[int, str]:
    ended = cluster.run("cluster/submit.py", *arguments, **environment)
    print(f"$ cluster/submit.py {' '.join(arguments)}\n{ended.stdout}exit code {ended.returncode}")
    return ended.returncode, ended.stdout


def test_the_doctor_finds_two_healthy_nodes(cluster: Raylets) -> None:
    code, levels, texts, text = doctor(cluster, *SETTINGS, f"run_dir={cluster.folder}/run")
    assert levels.keys() >= CHECKS
    assert "FAIL" not in levels.values(), text
    assert code == (1 if "WARN" in levels.values() else 0)
    assert "Ray with 2 nodes" in texts["cluster"]
    assert "asks every connection for its token" in texts["authentication"]
    assert "2 nodes alike: python 3." in texts["versions"]
    assert "2 ranks on 2 node(s): 16 MiB in" in texts["gloo"]
    assert "alike on 2 nodes" in texts["models"]
    assert not list(cluster.folder.glob(".g2rpo-doctor*"))


def test_submit_trains_and_ends_with_0(cluster: Raylets) -> None:
    run_dir = cluster.folder / "submitted"
    code, text = submit(cluster, *submission(run_dir), "--id", "first")
    assert code == 0, text
    assert "job first at http://127.0.0.1" in text
    assert "iteration 1/1" in text
    assert "the cluster has 4 CPU, 0 GPU on 2 nodes" in text
    assert "job first SUCCEEDED" in text
    assert json.loads((run_dir / "summary.json").read_text())["iterations"] == 1
    # No second job of the same name.
    code, text = submit(cluster, *submission(run_dir), "--id", "first")
    assert code == 2
    assert "first already exists" in text


def test_submit_ends_with_the_drivers_exit_code(cluster: Raylets) -> None:
    code, text = submit(cluster, *submission(cluster.folder / "other"), "learner.lr=1")
    assert code == 2
    assert "learner.lr: unknown key" in text
    assert "FAILED" in text


@pytest.mark.parametrize("token", ["wrong", "none", "mode unset"])
def test_nobody_comes_in_without_the_token(cluster: Raylets, token: str) -> None:
    changed = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN_PATH": str(cluster.folder / "wrong")}
    if token == "wrong":
        (cluster.folder / "wrong").write_text("0" * 64)
    elif token == "mode unset":
        changed = {"RAY_AUTH_MODE": "disabled"}
    else:
        (cluster.folder / "wrong").unlink(missing_ok=True)
    code, text = submit(cluster, *submission(cluster.folder / "other"), **changed)
    assert code == 2
    assert "not submitted" in text
    assert "Traceback" not in text
    assert "oken" in text


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["/no/run.yaml", "/runs/a"], "CONFIG /no/run.yaml: no file inside"),
        (["configs/quickstart.yaml", "runs/a"], "give an absolute path"),
        (["configs/quickstart.yaml", "/runs/a", "--env", "HF_TOKEN"], "looks like a secret"),
        (["configs/quickstart.yaml", "/dev/null/a", "--address", "http://127.0.0.1:1"],
         "not submitted to http://127.0.0.1:1"),
    ],
)  # fmt: skip
def test_what_cannot_be_submitted_is_refused(
    cluster: Raylets, arguments: list[str], named: str
) -> None:
    code, text = submit(cluster, *arguments)
    assert code == 2
    assert named in text
    assert "Traceback" not in text


def test_the_doctor_names_what_is_wrong(cluster: Raylets) -> None:
    other = cluster.folder / "site" / "diffusers-0.1.dist-info"
    other.mkdir(parents=True)
    (other / "METADATA").write_text("Metadata-Version: 2.1\nName: diffusers\nVersion: 0.1\n")
    third = cluster.start(
        f"--address={cluster.address}", "--num-cpus=1",
        PYTHONPATH=f"{other.parent}:{ROOT}",
    )  # fmt: skip
    code, levels, texts, text = doctor(
        cluster,
        *SETTINGS,
        "rollout.gpus_per_worker=1",
        "learner.label_selector={ray.io/accelerator-type: H200}",
        "tracking.wandb_project=mine",
        "model.path=/no/model",
        # Checkpoints for which every machine's disk has room.
        "model.lora={rank: 4, alpha: 4}",
        f"run_dir={cluster.folder}/token/run",
        WANDB_API_KEY="",
        GLOO_SOCKET_IFNAME="absent0",
        HOME=str(cluster.folder),
    )
    end_tree(third)
    assert code == 2
    assert {check for check, level in levels.items() if level == "FAIL"} == {
        "room", "secrets", "versions", "models", "storage", "gloo",
    }, text  # fmt: skip
    assert "wants 1 GPU and the cluster has 0" in texts["room"]
    assert "diffusers 0.1 (not " in texts["versions"]
    assert "no WANDB_API_KEY" in texts["secrets"]
    assert "model.path '/no/model': no such folder" in texts["models"]
    assert "Not a directory" in texts["storage"]
    assert "absent0" in texts["gloo"]
    assert "Traceback" not in text


def test_the_doctor_and_a_run_say_that_the_head_is_gone(cluster: Raylets) -> None:
    # Another port: the head of this module is still needed.
    code, levels, texts, _ = doctor(cluster, RAY_ADDRESS="127.0.0.1:1")
    assert (code, levels["cluster"]) == (2, "FAIL")
    assert "nobody answers at '127.0.0.1:1'" in texts["cluster"]
    ended = cluster.run(
        "-m", "g2rpo_ray.cli", "train", *SETTINGS, f"run_dir={cluster.folder}/gone",
        RAY_ADDRESS="127.0.0.1:1",
    )  # fmt: skip
    assert ended.returncode == 2
    assert "nobody answers at '127.0.0.1:1'" in ended.stdout
    assert "Traceback" not in ended.stdout
