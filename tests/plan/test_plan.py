"""``g2rpo plan``: splits, recommendation, predicted against measured time, and bad input."""

import json
from pathlib import Path

import pytest
import ray
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from g2rpo_ray.cli import main
from g2rpo_ray.config import load_config
from g2rpo_ray.config.rollout import SPEEDS
from g2rpo_ray.models.fp8 import Float8Twin
from g2rpo_ray.models.policy import load_policy
from g2rpo_ray.plan.costs import DATA_SHEETS, CardCosts, CostsError, CostTable, load_costs
from g2rpo_ray.plan.counting import TERA
from g2rpo_ray.plan.memory import DRAWING, HOLDER_GIB, LEARNING
from g2rpo_ray.plan.plan import Plan, make_plan
from g2rpo_ray.plan.prediction import CPU, Predictor
from g2rpo_ray.rollout.worker import RolloutWorker
from tests.plan.test_networks import PAPER
from tests.tiny import QUICKSTART, Redness, encode


def paper_plan(*overrides: str, gpus: int | None = 16) -> Plan:
    return make_plan(load_config(PAPER, overrides), load_costs(), gpus, "H100")


@pytest.mark.parametrize("path", sorted(QUICKSTART.parent.glob("*.yaml")), ids=lambda p: p.stem)
def test_every_shipped_configuration_has_a_plan(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    written = tmp_path / "plan.json"
    cluster_before = ray.is_initialized()  # other tests of this process may hold one
    # Held twice, by worker and rank, Qwen-Image does not fit into the 80 GB of the others.
    card = ["--card", "H200"] if path.stem.startswith("qwen_image") else []
    assert main(["plan", str(path), "--json", str(written), *card]) == 0
    printed = capsys.readouterr().out
    plan = json.loads(written.read_text())
    assert f"recommended: {plan['recommended']['overrides']}" in printed
    # A recipe ships no split that its own plan calls slow.
    assert 0 < plan["configured"]["iteration_s"] <= 1.1 * plan["recommended"]["iteration_s"]
    assert not plan["configured"]["missing_gib"]
    assert ray.is_initialized() == cluster_before


@pytest.mark.parametrize("gpus", [4, 8, 16, 24])
def test_recommended_split_fits_and_takes_all_cards(gpus: int) -> None:
    plan = paper_plan(gpus=gpus)
    best = plan.recommended
    if gpus == 4:
        # ZeRO-3 over two ranks needs more than two cards have, and rollout needs one.
        assert best is None or best.ranks >= 3
        return
    assert best is not None
    assert not best.missing_gib
    # A worker takes 0.9 of a card, the rewards the rest.
    assert best.workers + best.ranks == gpus
    assert best.iteration_s == min(
        split.iteration_s for split in plan.splits if not split.missing_gib
    )


def test_hundreds_of_cards() -> None:
    plan = paper_plan(gpus=256)
    assert plan.recommended is not None
    assert plan.recommended.workers + plan.recommended.ranks == 256
    # The paper's 16 prompts leave most of them idle, and the plan says so.
    assert [note for note in plan.predictor.notes if "256 GPUs want more" in note]
    assert not [note for note in paper_plan(gpus=24).predictor.notes if "want more" in note]
    prompts = "sampling.prompts_per_iteration=256"
    assert not [n for n in paper_plan(prompts, gpus=256).predictor.notes if "want more" in n]


def test_split_that_does_not_fit_says_what_is_missing() -> None:
    alone = next(split for split in paper_plan().splits if split.ranks == 1)
    (role, missing_gib) = next(iter(alone.missing_gib.items()))
    assert role == "learner rank"
    # A full fine-tune on one rank: 177 GiB of weights, gradients and state on a card of 80 GB.
    assert missing_gib > 177 - 80


def test_a_role_beside_another_shares_the_cards_memory() -> None:
    plan = paper_plan("rollout.gpus_per_worker=0.3", "rollout.workers=1")
    crowded = plan.predictor.split(workers=3, ranks=13)
    assert any(key.count("rollout worker") == 3 for key in crowded.missing_gib)


def test_small_cards_are_estimated_and_say_so(capsys: pytest.CaptureFixture[str]) -> None:
    recipe = str(PAPER.with_name("flux_g2rpo_hps_one_gpu_lora.yaml"))
    table, measured = load_costs(), load_costs().of("H100")
    assert not measured.is_estimate
    for card in DATA_SHEETS:
        costs = table.of(card)
        assert costs.memory_gib is not None
        assert int(card.rpartition("-")[2]) * 0.9 < costs.memory_gib < 48
        assert costs.rate("matrix").seconds > 2.5 * measured.rate("matrix").seconds
        slower, faster = (it.measured("evaluation")[0].seconds for it in (costs, measured))
        assert slower / faster == pytest.approx(989 / DATA_SHEETS[card][2])
        assert main(["plan", recipe, "--card", card]) == 0
        printed = capsys.readouterr().out
        assert f"{costs.card}, ESTIMATED from what was measured" in printed
        assert f"times on {card} are estimates" in printed
        assert ("does not fit: " in printed) is (costs.memory_gib < 39)


def test_frozen_weights_are_counted_once_a_card() -> None:
    recipe = PAPER.with_name("flux_g2rpo_hps_one_gpu_lora.yaml")
    frozen_gib = 11_901_408_320 * 2 / 2**30

    def on_the_card(*overrides: str) -> dict[str, float]:
        predictor = Predictor(load_config(recipe, overrides), load_costs(), "H100")
        return {role: sum(parts.values()) for role, parts in predictor.memory(1).items()}

    own, shared = on_the_card("model.share_frozen=false"), on_the_card()
    # One H200, 2026-11-29, scripts/bench_families.py: the whole card, without CLIP.
    assert sum(shared.values()) - shared["reward clip"] == pytest.approx(44.92, rel=0.1)
    assert shared.pop("frozen weights") == pytest.approx(frozen_gib + HOLDER_GIB)
    saved = {role: own[role] - gib for role, gib in shared.items()}
    roles = {"rollout worker": frozen_gib, "learner rank": frozen_gib}
    assert saved == pytest.approx({**dict.fromkeys(own, 0.0), **roles})
    # Every card that one of them is on has a holder, and only one.
    shares = ["rollout.gpus_per_worker=0.5", "rewards.hps.gpus_per_replica=1"]
    halves = load_config(recipe, shares)
    placed = Predictor(halves, load_costs(), "H100")._placed(workers=4, ranks=1)
    assert sorted(roles.count("frozen weights") for roles in placed) == [0, 1, 1, 1]


@pytest.mark.parametrize(
    ("recipe", "card", "frozen_gib", "needs_gib", "too_small"),
    [
        # Frozen weights, contexts and one margin; drawing or learning, whichever takes more.
        ("flux_g2rpo_hps_40gb_lora", "A100-40", 22.168, 38.0, "RTX5090-32"),
        ("flux_g2rpo_hps_24gb_lora", "RTX4090-24", 11.152, 22.5, "RTX5090-32"),
    ],
)
def test_a_recipe_for_a_small_card_fits_on_it(
    recipe: str, card: str, frozen_gib: float, needs_gib: float, too_small: str
) -> None:
    config = load_config(PAPER.with_name(f"{recipe}.yaml"))
    plan = make_plan(config, load_costs(), None, card)
    assert (plan.cards, plan.configured.missing_gib) == (1, {})
    memory = plan.predictor.memory(1)
    assert memory["frozen weights"]["transformer"] == pytest.approx(frozen_gib, abs=1e-2)
    roles, gib = plan.predictor.fullest_card(1, 1)
    assert sorted(roles.split(" + ")) == [
        "frozen weights", "learner rank", "reward hps", "rollout worker"
    ]  # fmt: skip
    assert needs_gib - 4 < gib < needs_gib
    whole = sum(sum(memory[role].values()) for role in roles.split(" + "))
    working = [memory["learner rank"][LEARNING]]
    working.append(memory["rollout worker"][DRAWING] + memory["reward hps"][DRAWING])
    # Four margins of .4 to 2.4 beside contexts, of which the largest stays.
    assert gib == pytest.approx(whole - min(working) - 2 * 2.4 - 0.4)
    # Where some evaluate while the others train, nobody waits.
    aside = config.model_copy(
        update={"evaluation": config.evaluation.model_copy(update={"workers": 1, "every": 50})}
    )
    assert Predictor(aside, load_costs(), card).fullest_card(1, 1)[1] > whole
    whole_base = config.model_copy(
        update={"model": config.model.model_copy(update={"frozen_dtype": None})}
    )
    missing = make_plan(whole_base, load_costs(), None, too_small).configured.missing_gib
    assert bool(missing)


def test_another_attention_than_the_measured_one_is_told() -> None:
    costs = load_costs()
    plain, other = (
        Predictor(load_config(PAPER, overrides), costs, "H200")
        for overrides in ([], ["rollout.attention=flash3"])
    )
    told = "rollout.attention=flash3: evaluations are counted as with cudnn"
    assert told in other.notes
    assert [note for note in other.notes if note != told] == plain.notes


def test_weights_in_8_bits_are_widened_in_every_pass() -> None:
    config = load_config(PAPER.with_name("flux_g2rpo_hps_24gb_lora.yaml"))
    tree = load_costs().model_dump()
    for name, entry in tree["cards"].items():
        entry["rates"].pop("widening", None)
        if name == "H100":
            entry["rates"]["widening"] = {"amount": 1e12, "seconds": 2.0}
    known = Predictor(config, CostTable.model_validate(tree), "H100")
    tree["cards"]["H100"]["rates"].pop("widening")
    unknown = Predictor(config, CostTable.model_validate(tree), "H100")
    assert [note for note in unknown.notes if "widening the weights" in note]
    assert not [note for note in known.notes if "widening the weights" in note]
    once_s, work = known.size.rounded_parameters * 2e-12, known.work
    assert known.size.rounded_parameters == 11_834_228_736
    prompts = config.sampling.prompts_per_iteration
    drawing = known.generate_s(1) - unknown.generate_s(1)
    assert drawing == pytest.approx(prompts * work.evaluation_passes * once_s)
    # Forward, recomputed, backward.
    learning = known.learn_s(1) - unknown.learn_s(1)
    assert learning == pytest.approx(prompts * work.learner_batches * 3 * once_s)
    # By the memory's rate on a card of a data sheet.
    table = load_costs().model_copy(update={"cards": {"H100": known.costs}})
    assert table.of("RTX4090-24").rates["widening"].seconds == pytest.approx(2 * 3350 / 1008)


def test_no_split_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(PAPER), "--gpus", "2", "rollout.gpus_per_worker=0.7"]) == 0
    printed = capsys.readouterr().out
    assert "No split fits" in printed
    assert "learner.offload_optimizer=true" in printed
    assert "model.trained_modules" in printed
    assert "model.frozen_dtype=float8" in printed


def test_an_offloaded_optimizer_fits_where_it_was_measured(
    capsys: pytest.CaptureFixture[str],
) -> None:
    offload = "learner.offload_optimizer=true"
    assert paper_plan(gpus=4).predictor.split(2, 2).missing_gib
    assert not paper_plan(offload, gpus=4).predictor.split(2, 2).missing_gib
    assert main(["plan", str(PAPER), "--gpus", "4", offload]) == 0
    printed = capsys.readouterr().out
    assert "Host memory of a rank beside its process, GiB: 173" in printed
    assert "on their way to the host" not in printed


def test_a_family_has_its_own_passes_and_a_step_costs_by_tensors() -> None:
    recipe = PAPER.parent / "sd3_5_medium_g2rpo_hps_lora.yaml"
    config = load_config(recipe)
    tree = load_costs().model_dump()
    own = Predictor(config, load_costs(), "H200")
    (learned,) = tree["cards"]["H200"]["families"]["StableDiffusion3Pipeline"].pop(
        "learner_lora_checkpointing_compiled"
    )
    reference = Predictor(config, CostTable.model_validate(tree), "H200")
    # 4 prompts of 5 steps; a pass of such few operations is what starting its kernels takes.
    passes_s = 4 * 5 * learned["seconds"]
    assert own.learn_s(1) == pytest.approx(passes_s + 382 * 0.000275, rel=0.02)
    # Without them, or eager, as FLUX.1's eager passes.
    eager = Predictor(load_config(recipe, ["learner.compile=false"]), load_costs(), "H200")
    assert reference.learn_s(1) == eager.learn_s(1) > 2 * own.learn_s(1)


def test_gradients_take_time_on_their_way_to_the_host() -> None:
    config = load_config(PAPER, ["learner.offload_optimizer=true"])
    tree = load_costs().model_dump()
    rate = tree["cards"]["H100"]["rates"].pop("gradients_to_host")
    counted = Predictor(config, load_costs(), "H100")
    without = Predictor(config, CostTable.model_validate(tree), "H100")
    assert [note for note in without.notes if "gradients on their way to the host" in note]
    # 16 prompts of 8 passes, over 4 ranks; a bfloat16 gradient for each parameter of a shard.
    moved = 16 / 4 * 8 * counted.size.parameters / 4 * 2
    added = counted.learn_s(4) - without.learn_s(4)
    assert added == pytest.approx(moved * rate["seconds"] / rate["amount"])


def test_work_of_a_prompt_by_hand() -> None:
    work = paper_plan().predictor.work
    assert work.counts.evaluations == 1504
    # 16 anchor evaluations alone, 1488 others in batches of 8; 8 requests of 24 pictures.
    assert work.evaluation_passes == 16 + 186
    assert (work.requests, work.learner_batches, work.learner_rows) == (8, 8, 1)
    several = ["learner.update=per_iteration", "learner.steps_per_pass=3"]
    work = paper_plan(*several).predictor.work
    assert (work.learner_batches, work.learner_rows) == (3, 3)
    four = ["learner.update=per_iteration", "learner.updates_per_iteration=4"]
    predictor = paper_plan(*four).predictor
    assert (predictor.work.learner_batches, predictor.updates) == (4 * 8, 4)
    # 15 stochastic steps of 12 members, of which 9 are trained: batches of 4.
    dance = make_plan(
        load_config(PAPER, ["algorithm=dance_grpo", "sampling.sde=dance", "rollout.batch_size=4"]),
        load_costs(),
        16,
        None,
    ).predictor.work
    assert dance.evaluation_passes == 16 * 3
    assert (dance.requests, dance.learner_batches, dance.learner_rows) == (1, 27, 4)
    # Of 3 members each in four updates, none of which fills a batch.
    parts = ["algorithm=dance_grpo", "sampling.sde=dance", "rollout.batch_size=4", *four]
    dance = make_plan(load_config(PAPER, parts), load_costs(), 16, None).predictor.work
    assert (dance.learner_batches, dance.learner_rows) == (4 * 9, 3)


MEASURED_S = {
    # scripts/bench_rollout.py: seconds of a whole prompt, 2026-12-01 and 2026-11-28.
    ("H200", "speed=exact"): 96.9,
    ("H200", "speed=balanced"): 43.7,
    ("H200", "completion_stride=2 rollout.fp8=true rollout.fp8_above_sigma=0.75"): 40.2,
    ("H200", "speed=fast"): 34.4,
    ("H100", "speed=exact"): 104.8,
    ("H100", "fp8=true"): 75.7,
}


@pytest.mark.parametrize(("card", "settings"), MEASURED_S)
def test_seconds_of_a_prompt_against_measured_speeds(card: str, settings: str) -> None:
    overrides = [*f"rollout.{settings}".split(), "sampling.prompts_per_iteration=1"]
    overrides += ["rollout.batch_size=8", "rollout.decode_batch_size=4"]
    predictor = Predictor(load_config(PAPER, overrides), load_costs(), card)
    assert predictor.generate_s(1) == pytest.approx(MEASURED_S[card, settings], rel=0.1)


def test_a_float8_copy_is_counted(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"run_dir={tmp_path}", "rollout.fp8=true"])
    predictor = Predictor(config, load_costs(), CPU)
    twin = Float8Twin(load_policy(config))
    held = sum(b.nbytes for layer in twin._layers for b in layer.buffers())
    assert predictor.memory(1)["rollout worker"]["float8 copy"] == held / 2**30
    exact = config.model_copy(update={"rollout": config.rollout.model_copy(update=SPEEDS["exact"])})
    assert not Predictor(exact, load_costs(), CPU).memory(1)["rollout worker"]["float8 copy"]


def test_a_plan_says_which_speed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "rollout.speed=fast"]) == 0
    assert "speed  fast: completions evaluated every 3 steps" in capsys.readouterr().out
    rough = ["rollout.fp8=true", "rollout.fp8_above_sigma=0.5", "rollout.completion_stride=2"]
    assert main(["plan", str(QUICKSTART), *rough]) == 0
    printed = capsys.readouterr().out
    ways = "float8 products above noise level 0.5, completions evaluated every 2 steps"
    assert f"speed  {ways}" in printed
    assert "no evaluation_float8 was measured" not in printed


def test_more_ranks_and_workers_never_take_longer() -> None:
    predictor = paper_plan().predictor
    generate = [predictor.generate_s(workers) for workers in (1, 2, 4, 8, 16, 32)]
    assert generate == sorted(generate, reverse=True)
    # 16 prompts are drawn whole: 16 workers need one round, and more than 16 idle.
    assert generate[-1] == generate[-2]
    alone, sixteen = predictor.learn_s(1), predictor.learn_s(16)
    assert sixteen < alone


def test_workers_on_one_card_share_what_it_computes() -> None:
    shared = ["rollout.gpus_per_worker=0.45", "learner.ranks=1", "learner.gpus_per_rank=0.2"]
    predictor = paper_plan(*shared).predictor
    whole, half = predictor.split(4, 1), predictor.split(2, 1)
    assert half.generate_s == predictor.split(1, 1).generate_s
    assert whole.generate_s < half.generate_s
    # Of the splits over two cards the one with workers on both; NCCL takes no two ranks on a card.
    assert [(split.workers, split.ranks) for split in predictor.splits(2)] == [(3, 1)]


def test_seconds_come_from_the_operations_that_a_real_rollout_computes(tmp_path: Path) -> None:
    config = load_config(QUICKSTART, [f"run_dir={tmp_path}", "sampling.prompts_per_iteration=6"])
    worker = RolloutWorker(config, Redness(sorted(config.rewards)))
    prompt = encode(config)[0]
    # The counter knows the two products of attention, but not the CPU's fused kernel.
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        worker.rollout(prompt, 0, 0)
    tree = load_costs().model_dump()
    second_a_tflop = [{"batch": 1, "seconds": 1.0, "tflop": 1.0}]
    tree["cards"][CPU]["passes"] = {
        name: second_a_tflop for name in ("evaluation", "decode", "score_hps", "score_clip")
    }
    predictor = Predictor(config, CostTable.model_validate(tree), CPU)
    # A core that scores does not draw: the two add up.
    scored = [r.size for r in predictor.rewards.values() if r.settings.weight > 0 and r.size]
    scoring_s = predictor.work.counts.pictures * sum(size.image.tflop for size in scored)
    prompt_s = counter.get_total_flops() / TERA + scoring_s
    assert predictor.generate_s(drawing_cards=1) == pytest.approx(6 * prompt_s, rel=1e-6)
    assert predictor.generate_s(drawing_cards=4) == pytest.approx(2 * prompt_s, rel=1e-6)


def test_pass_cost_is_a_line_through_two_batches() -> None:
    costs = _with_evaluation(load_costs().of("H100"), [(1, 0.1), (8, 0.66)])
    cost = costs.pass_cost("evaluation")
    assert cost.fixed_s == pytest.approx(0.02)
    assert cost.time_s(passes=3, tflop=5 * 37.0) == pytest.approx(3 * 0.02 + 5 * 0.08)
    # A small batch that is the better one leaves no fixed part.
    costs = _with_evaluation(costs, [(1, 0.05), (8, 0.8)])
    assert costs.pass_cost("evaluation").fixed_s == 0


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--gpus", "0"], "--gpus 0: at least 1 is needed"),
        (["--gpus", "1"], "1 GPU(s) do not hold a rollout worker, a learner rank"),
        (["--card", "T-800"], "no measured costs for card 'T-800'; known are H100, H200, cpu-core"),
        (["--costs", "/no/costs.json"], "--costs /no/costs.json: cannot be read"),
        (["sampling.stepps=3"], "sampling.stepps: unknown key"),
    ],
)
def test_bad_input_is_exit_code_2(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", str(PAPER), *arguments]) == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("{", "not JSON"),
        ("[]", "valid dictionary"),
        ('{"cards": {"H100": {"card": "x"}}}', "cards.H100.date: Field required"),
        ('{"cards": {}}', "no measured costs for card 'H100'"),
    ],
)
def test_bad_table_of_costs(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "costs.json"
    path.write_text(text)
    assert main(["plan", str(PAPER), "--costs", str(path)]) == 2
    assert named in capsys.readouterr().err


def test_gpus_do_not_apply_to_a_run_on_cpus(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", str(QUICKSTART), "--gpus", "4"]) == 2
    assert "runs on CPUs" in capsys.readouterr().err


def test_missing_measurement_is_named() -> None:
    costs = load_costs()
    empty = costs.of("H100").model_copy(update={"passes": {}})
    table = costs.model_copy(update={"cards": {**costs.cards, "H100": empty}})
    with pytest.raises(CostsError, match="no 'evaluation' for NVIDIA H100"):
        make_plan(load_config(PAPER), table, 16, "H100")


def _with_evaluation(costs: CardCosts, points: list[tuple[int, float]]) -> CardCosts:
    measured = [
        {"batch": batch, "seconds": seconds, "tflop": 37.0 * batch} for batch, seconds in points
    ]
    tree = costs.model_dump()
    tree["passes"]["evaluation"] = measured
    return CardCosts.model_validate(tree)
