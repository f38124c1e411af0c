"""The chapters of the book, each a list of claims.

The papers' figures are quoted with their table or figure. All models here are toys of 0.1 million parameters on bytes
of Python's standard library, with 960 inner steps for each worker, unless a claim says otherwise.

Papers: DiLoCo 2311.08105; Streaming DiLoCo 2501.18512; Scaling laws 2503.09799; Eager updates 2502.12996; Asynchronous
Local-SGD 2401.09135; OpenDiLoCo 2407.07852; MuLoCo 2505.23725; SparseLoCo 2508.15706; MiniCPM 2404.06395.
"""

from __future__ import annotations

from tests.benchmarks.book.arm import BATCH, INNER_STEPS, STEPS, WORKERS, Arm
from tests.benchmarks.book.claims import SEEDS, Claim, Rule, cosine, early_loss, gap_gained, loss

BASE = Arm()
PLAIN = BASE.but(kind="plain")
DATA_PARALLEL = BASE.but(kind="data-parallel", inner_lr=4e-3)
SERIAL = PLAIN.but(steps=STEPS * WORKERS)
SPEEDS = (1.0, 1.0, 0.25, 0.0625)
ANCHOR_SEEDS = 10
"""Seeds of the claims whose limit is narrow."""
WHY_SEEDS = 4
"""Seeds of claims that explain another one."""


MUON = BASE.but(inner="muon", inner_lr=16e-3)
OUTER_SGD = BASE.but(optimizer="sgd", outer_lr=1.5)
OUTER_MOMENTUM = BASE.but(optimizer="momentum", outer_lr=1.0, momentum=0.3)
OUTER_ADAM = BASE.but(optimizer="adam", outer_lr=0.01)
ONE_WORKER: dict[str, float] = {"outer_lr": 0.5}
"""The outer step of a single worker."""
H_120 = {"outer_lr": 1.0, "momentum": 0.3}
H_480 = {"outer_lr": 1.0, "momentum": 0.0}
OVERLAPPED = {"momentum": 0.9}
"""The outer step of overlapped rounds."""
LATE = {"momentum": 0.6}
"""The outer step of rounds whose mean is applied a round late."""
SPARSE: dict[str, object] = {"optimizer": "sgd", "outer_lr": 2.0}
"""The outer step of SparseLoCo."""
CLUSTERS: dict[str, object] = {"shards": "clusters", "weights": "shard"}
"""A different shard for each worker, and weights by the shards' sizes."""
EQUAL_TOKENS_LR: dict[int, float] = {}
"""Inner rates of at_equal_tokens, by K."""


def at_equal_tokens(workers: int) -> Arm:
    """K workers that share the batch of eight. So steps and tokens stay the same, as in the paper."""
    lr = EQUAL_TOKENS_LR.get(workers, BASE.inner_lr)
    return BASE.but(workers=workers, batch=BATCH * WORKERS // workers, inner_lr=lr)


def overlapped(ratio: float, **changes: object) -> Arm:
    """Rounds whose result is applied after this share of H."""
    return BASE.but(tau=round(ratio * INNER_STEPS), **OVERLAPPED, **changes)


BELOW, ABOVE, WITHIN = Rule.BELOW, Rule.ABOVE, Rule.WITHIN

WORKERS_CHAPTER = [
    Claim(
        "workers-8",
        "Eight workers are better than one, with the same steps of each.",
        "DiLoCo, table 3",
        "15.08 against 16.23, -7.1 % (150M, H 500)",
        BASE,
        PLAIN,
        BELOW,
    ),
    Claim(
        "workers-2",
        "Two workers are better than one, with the same steps of each.",
        "DiLoCo, table 3",
        "K 4: 15.23 against 16.23, -6.2 %",
        BASE.but(workers=2),
        PLAIN,
        BELOW,
        note="K 2 in place of 4.",
    ),
    Claim(
        "workers-4-to-8",
        "Eight workers are better than four.",
        "DiLoCo, table 3",
        "15.08 against 15.23, -1.0 %",
        BASE,
        BASE.but(workers=4),
        BELOW,
    ),
    Claim(
        "workers-8-to-16",
        "Sixteen workers are better than eight.",
        "DiLoCo, table 3",
        "15.02 against 15.08, -0.4 %",
        BASE.but(workers=16),
        BASE,
        BELOW,
    ),
    Claim(
        "workers-16-to-32",
        "Beyond 16 workers little changes: at most 2 %.",
        "DiLoCo, table 3",
        "K 64 against 16: 14.95 against 15.02, -0.5 %",
        BASE.but(workers=32),
        BASE.but(workers=16),
        WITHIN,
        2.0,
        note="K 32 in place of 64.",
        seeds=4,
    ),
    Claim(
        "workers-2-equal-tokens",
        "With the same tokens in all, two workers lose at most 1 % against one.",
        "Scaling laws, table 4",
        "+0.7 % of loss (35M, H 30)",
        at_equal_tokens(2),
        at_equal_tokens(1),
        BELOW,
        1.0,
        loss,
        note="Workers share one batch. Each has the best inner rate of a grid.",
    ),
    Claim(
        "workers-8-equal-tokens",
        "With the same tokens in all, eight workers are worse than one.",
        "Scaling laws, table 4",
        "3.621 against 3.482, +4.0 % of loss (35M, H 30); +1.5 % at 2.4B",
        at_equal_tokens(8),
        at_equal_tokens(1),
        ABOVE,
        0.0,
        loss,
        note="As above.",
    ),
]

LOCAL_STEPS = [
    Claim(
        "steps-120",
        "Synchronising a quarter as often costs at most 1 %.",
        "Streaming DiLoCo, table 5",
        "H 100 against 30: 3.56 against 3.53, +0.8 % of loss (35M)",
        BASE.but(inner_steps=120, **H_120),
        BASE,
        BELOW,
        1.0,
        loss,
        note="Without fragments, overlap and E3M0, and K 8 in place of 2. H 120 has the best outer step of a grid.",
    ),
    Claim(
        "steps-480",
        "Synchronising a sixteenth as often costs at most 3 %.",
        "DiLoCo, section 3.1",
        "H 1000 against 50: +2.9 % of perplexity",
        BASE.but(inner_steps=480, **H_480),
        BASE,
        BELOW,
        3.0,
        note="Two rounds here, 64 in the paper, whose shards differ. H 480 has the best outer step of a grid.",
    ),
    Claim(
        "steps-10",
        "Synchronising three times as often helps by less than 1 %.",
        "DiLoCo, section 3.1 and figure 4",
        "little gain below H 500",
        BASE.but(inner_steps=10),
        BASE,
        ABOVE,
        -1.0,
        note="The paper compares H 50 to 500. The outer step is that of H 30.",
    ),
    Claim(
        "steps-5",
        "Synchronising six times as often helps by less than 1 %.",
        "Scaling laws, figure 9",
        "H 1 is the worst of 1 to 300",
        BASE.but(inner_steps=5),
        BASE,
        ABOVE,
        -1.0,
        loss,
        note="The outer step is that of H 30.",
    ),
]

BASELINES = [
    Claim(
        "data-parallel",
        "DiLoCo is better than data parallel training with the same steps and tokens.",
        "DiLoCo, table 2",
        "15.02 against 15.30, -1.8 %",
        BASE,
        DATA_PARALLEL,
        BELOW,
        note="From scratch and on one text; the paper starts from a model that one worker trained for 24,000 steps, "
        "and its workers have different shards.",
    ),
    Claim(
        "data-parallel-pretrained",
        "The same, from a model that one worker trained first.",
        "DiLoCo, table 2",
        "15.02 against 15.30, -1.8 %",
        BASE.but(pretrain=0.25),
        DATA_PARALLEL.but(pretrain=0.25),
        BELOW,
    ),
    Claim(
        "serial",
        "DiLoCo costs at most 2 % against one worker that makes all steps of all workers.",
        "DiLoCo, table 2",
        "15.02 against 14.72, +2.0 %",
        BASE,
        SERIAL,
        BELOW,
        2.0,
        note="On one text; the paper's workers have different shards.",
    ),
    Claim(
        "one-with-outer-step",
        "An outer step helps a single worker.",
        "DiLoCo, figure 9; Scaling laws, table 4",
        "3.482 against 3.485, -0.1 % of loss (35M)",
        BASE.but(workers=1, **ONE_WORKER),
        PLAIN,
        BELOW,
        0.0,
        loss,
    ),
    Claim(
        "slow-early",
        "DiLoCo is worse than data parallel training after a quarter of the tokens.",
        "OpenDiLoCo, section 3",
        "less efficient early, equal at the end (150M, H 500)",
        BASE,
        DATA_PARALLEL,
        ABOVE,
        0.0,
        early_loss,
    ),
    Claim(
        "late-gain",
        "DiLoCo gains on data parallel training from a quarter of the tokens to the end.",
        "OpenDiLoCo, section 3",
        "less efficient early, equal at the end (150M, H 500)",
        BASE,
        DATA_PARALLEL,
        ABOVE,
        0.0,
        gap_gained,
    ),
]

OUTER = [
    Claim(
        "nesterov-sgd",
        "Nesterov momentum is better than plain SGD as the outer optimizer.",
        "DiLoCo, figure 6",
        "better (a figure only)",
        BASE,
        OUTER_SGD,
        BELOW,
    ),
    Claim(
        "nesterov-momentum",
        "Nesterov momentum is better than classical momentum.",
        "DiLoCo, figure 6",
        "better (a figure only)",
        BASE,
        OUTER_MOMENTUM,
        BELOW,
    ),
    Claim(
        "nesterov-adam",
        "Nesterov momentum is better than Adam as the outer optimizer.",
        "DiLoCo, figure 6",
        "better (a figure only)",
        BASE,
        OUTER_ADAM,
        BELOW,
        note="The paper needs an epsilon of 0.1; the grid has both.",
    ),
]

LOST = [
    *(
        Claim(
            f"drop-{percent}-{rule}",
            f"Losing each contribution with probability {percent} % costs at most 3 %"
            + (", if its worker moves to the new anchor." if rule == "carry" else ", if its worker trains on."),
            "DiLoCo, figure 8",
            "50 % lost: +2.1 % at most, with different shards",
            BASE.but(drop=percent / 100, drop_rule=rule, **settings),
            BASE,
            BELOW,
            3.0,
            seeds=ANCHOR_SEEDS if percent == 50 else SEEDS,
        )
        for percent in (10, 30, 50)
        for rule, settings in (("carry", {}), ("stay", {"weights": "uniform", "clip": False}))
    ),
    *(
        Claim(
            f"drop-50-clusters-{rule}",
            "The same for 50 %, with a different shard for each worker"
            + (" that moves to the new anchor." if rule == "carry" else " that trains on."),
            "DiLoCo, figure 8",
            "+2.1 %",
            BASE.but(drop=0.5, drop_rule=rule, shards="clusters", **settings),
            BASE.but(shards="clusters", weights=weights),
            BELOW,
            3.0,
        )
        for rule, weights, settings in (
            ("carry", "uniform", {}),
            ("stay", "shard", {"weights": "shard", "clip": False}),
        )
    ),
]

WHY: list[tuple[str, str, dict[str, object], str]] = [
    ("more-rounds", "if rounds are three times as many", {"inner_steps": 10}, "96 rounds instead of 32."),
    (
        "long-rounds",
        "if rounds are four times as long",
        {"inner_steps": 120, **H_120},
        "8 rounds. The paper's H is 500.",
    ),
    ("pretrained", "after a start by one worker", {"pretrain": 0.25}, "The paper starts so. 24 rounds."),
]
"""What may explain a cost that the paper does not have: too few or too short rounds, or the start from scratch."""

LOST += [
    Claim(
        f"drop-50-{name}-{rule}",
        f"Losing 50 % costs at most 3 % {when}"
        + (", if the worker moves to the new anchor." if rule == "carry" else ", if the worker trains on."),
        "DiLoCo, figure 8",
        "50 % lost: +2.1 % at most, with different shards",
        BASE.but(drop=0.5, drop_rule=rule, **start, **settings),
        BASE.but(**start),
        BELOW,
        3.0,
        note=note,
        seeds=WHY_SEEDS,
    )
    for name, when, start, note in WHY
    for rule, settings in (("carry", {}), ("stay", {"weights": "uniform", "clip": False}))
]

PRUNED = [
    Claim(
        f"prune-{percent}",
        f"Pruning {percent} % of each contribution by sign costs at most {limit:g} %.",
        "DiLoCo, table 6",
        f"{paper} of perplexity",
        BASE.but(prune=percent / 100),
        BASE,
        BELOW,
        limit,
        note="Per neuron, as the paper says: small elements against the sign of the neuron's sum go first. The paper's "
        "workers have different shards.",
        seeds=ANCHOR_SEEDS if percent == 50 else SEEDS,
    )
    for percent, paper, limit in ((25, "-0.06 %", 1.0), (50, "+0.39 %", 1.0), (75, "+1.66 %", 3.0))
]

PRUNED += [
    Claim(
        f"prune-50-{name}",
        f"Pruning 50 % costs at most 1 % {when}.",
        "DiLoCo, table 6",
        "+0.39 % of perplexity",
        BASE.but(prune=0.5, **settings, **raised),
        BASE.but(**settings),
        BELOW,
        1.0,
        note=note,
        seeds=ANCHOR_SEEDS if raised else WHY_SEEDS,
    )
    for name, when, settings, raised, note in (
        *((name, when, settings, {}, note) for name, when, settings, note in WHY),
        ("clusters", "if each worker has a different shard", CLUSTERS, {}, "The paper's shards differ."),
        ("outer-rate", "if the outer rate is 1.0", {}, {"outer_lr": 1.0}, "0.7 without pruning, the best of a grid."),
    )
]

COMPUTE = [
    Claim(
        "doubling-halving",
        "Only the sum of the computing counts: doubling the workers at half time equals halving them.",
        "DiLoCo, figure 7",
        "equal (a figure only)",
        BASE.but(schedule="doubling"),
        BASE.but(schedule="halving"),
        WITHIN,
        0.5,
        seeds=ANCHOR_SEEDS,
    ),
    Claim(
        "ramp-up-down",
        "Adding workers one by one equals removing them one by one.",
        "DiLoCo, figure 7",
        "equal (a figure only)",
        BASE.but(schedule="up"),
        BASE.but(schedule="down"),
        WITHIN,
        0.5,
    ),
    Claim(
        "late-joiners",
        "Late joiners add compute: four workers that become eight are better than four.",
        "DiLoCo, figure 7",
        "better (a figure only)",
        BASE.but(schedule="doubling"),
        BASE.but(workers=4),
        BELOW,
    ),
]

SHARDS = [
    Claim(
        "clusters",
        "A different shard for each worker costs at most 1 %.",
        "DiLoCo, table 3",
        "15.02 against 15.08, -0.4 %",
        BASE.but(**CLUSTERS),
        BASE,
        BELOW,
        1.0,
        seeds=ANCHOR_SEEDS,
    ),
    Claim(
        "weighted-by-shard",
        "With different shards, weights by the shards' sizes are better than equal weights.",
        "DiLoCo, section 6.1",
        "beneficial (no figure)",
        BASE.but(**CLUSTERS),
        BASE.but(shards="clusters", weights="uniform"),
        BELOW,
    ),
]

START = [
    Claim(
        "from-scratch",
        "Starting from scratch costs at most 1 % against a start from a trained model.",
        "DiLoCo, figure 3",
        "at most 0.1 of about 15, +0.7 %",
        BASE,
        BASE.but(pretrain=0.25),
        BELOW,
        1.0,
        note="As in the paper, the start is a quarter of the steps, by one worker, so it has fewer tokens in all.",
    ),
    Claim(
        "long-start",
        "A start of half of all steps is not better than one of a quarter.",
        "DiLoCo, figure 3",
        "similar up to a quarter of the steps (a figure only)",
        BASE.but(pretrain=0.5),
        BASE.but(pretrain=0.25),
        ABOVE,
        note="As in the paper, a longer start has fewer tokens in all, which favours the claim.",
    ),
]

INNER = [
    Claim(
        "synced-adam",
        "Averaging the state of the inner optimizer, too, changes less than 1 %.",
        "DiLoCo, section 6.1",
        "no significant gain (no figure)",
        BASE.but(adam="synced"),
        BASE,
        WITHIN,
        1.0,
    ),
    Claim(
        "muon",
        "Muon as the inner optimizer is better than AdamW.",
        "MuLoCo, K 16",
        "3.222 against 3.326, -3.1 % of loss (150M, H 30)",
        MUON,
        BASE,
        BELOW,
        0.0,
        loss,
        note="K 8 in place of 16. Each has the best inner rate of a grid.",
    ),
    Claim(
        "wsd",
        "With the same tokens, a constant rate with a decay at the end (WSD) is within 0.5 % of a cosine.",
        "MiniCPM, section 4",
        "as good with a decay of 10 % of the tokens (no figure read)",
        BASE.but(inner_schedule="wsd"),
        BASE,
        WITHIN,
        0.5,
        loss,
        note="Both have the same peak and no warm-up. The decay is a square root over the last tenth of the steps.",
        seeds=ANCHOR_SEEDS,
    ),
]

OVERLAP = [
    Claim(
        "overlap-7",
        "Applying the mean 2 of 30 steps late costs at most 0.5 %.",
        "Streaming DiLoCo, figure 8",
        "below 0.2 % of loss up to 10 steps late",
        overlapped(2 / INNER_STEPS),
        BASE,
        BELOW,
        0.5,
        loss,
    ),
    Claim(
        "overlap-20",
        "Applying the mean 20 % of a round late costs at most 0.5 %.",
        "Streaming DiLoCo, figure 8",
        "below 0.2 % of loss up to 10 steps late",
        overlapped(0.2),
        BASE,
        BELOW,
        0.5,
        loss,
    ),
    Claim(
        "overlap-40",
        "Applying the mean 40 % of a round late costs at most 2 %.",
        "Streaming DiLoCo, figure 8",
        "below 0.2 % of loss up to 10 steps late, more beyond (a figure only)",
        overlapped(0.4),
        BASE,
        BELOW,
        2.0,
        loss,
    ),
    Claim(
        "overlap-97",
        "Applying the mean a whole round late costs at most 2 % if each worker keeps its own progress.",
        "Eager updates, table 2",
        "eager updates: 2.69 against 2.67, +0.7 % of loss",
        BASE.but(tau=INNER_STEPS - 1, merge="correction", **LATE),
        BASE,
        BELOW,
        2.0,
        loss,
        note="29 of 30 steps late. The node's correction rule in place of the paper's eager rule.",
    ),
    Claim(
        "fragments",
        "Three fragments cost at most 0.5 % against one.",
        "Eager updates, table 3",
        "2.67 against 2.68, -0.4 % of loss",
        overlapped(2 / INNER_STEPS, fragments=3),
        overlapped(2 / INNER_STEPS),
        BELOW,
        0.5,
        loss,
        note="All means are applied 2 of 30 steps late.",
    ),
]

BITS = [
    *(
        Claim(
            f"bits-{codec}",
            f"Contributions and mean in {codec} cost at most {limit:g} %.",
            source,
            paper,
            BASE.but(codec=codec),
            BASE,
            BELOW,
            limit,
            loss,
            note="The paper encodes contributions only; here the mean is encoded, too." if codec == "e3m0" else "",
            seeds=ANCHOR_SEEDS if codec == "fp16" else SEEDS,
        )
        for codec, limit, source, paper in (
            ("fp16", 0.1, "OpenDiLoCo, section 3", "no loss (a figure only)"),
            ("int8", 0.5, "INTELLECT-1, section 2.2", "comparable (no figure)"),
            ("int4", 0.5, "MuLoCo", "no loss (a figure only)"),
            ("e3m0", 0.5, "Streaming DiLoCo, figure 11", "no loss (a figure only)"),
        )
    ),
    Claim(
        "int4-feedback",
        "Error feedback makes int4 at most 0.5 % worse.",
        "MuLoCo",
        "no loss with feedback (a figure only)",
        BASE.but(codec="int4", feedback="classic", result_feedback="classic"),
        BASE.but(codec="int4"),
        BELOW,
        0.5,
        loss,
    ),
    Claim(
        "int4-loco",
        "Contributions and mean in int4, both with LoCo's feedback, cost at most 0.5 %.",
        "LoCo, abstract",
        "no loss with 4-bit gradients (no figure read)",
        BASE.but(codec="int4", feedback="loco", result_feedback="loco"),
        BASE,
        BELOW,
        0.5,
        loss,
        note="The paper encodes the gradient of each step, not that of each round.",
    ),
    Claim(
        "int2",
        "Contributions in 2 bits and their mean in int8, both with feedback, cost at most 0.5 %.",
        "MuLoCo",
        "nearly lossless with feedback (no figure read)",
        BASE.but(codec="int2", result_codec="int8", feedback="classic", result_feedback="classic"),
        BASE,
        BELOW,
        0.5,
        loss,
        seeds=ANCHOR_SEEDS,
    ),
    Claim(
        "int2-int4",
        "The same with the mean in int4.",
        "MuLoCo",
        "nearly lossless with feedback (no figure read)",
        BASE.but(codec="int2", result_codec="int4", feedback="classic", result_feedback="classic"),
        BASE,
        BELOW,
        0.5,
        loss,
    ),
    Claim(
        "int2-alone",
        "Contributions and mean in 2 bits without feedback cost at most 0.5 %.",
        "MuLoCo",
        "a statistical codebook works, and min-max degrades (no figure read)",
        BASE.but(codec="int2"),
        BASE,
        BELOW,
        0.5,
        loss,
        note="The node refuses this setting.",
        seeds=3,
    ),
    Claim(
        "topk-sparse-mean",
        "The largest 256 of 4,096 elements in 2 bits, of contributions (with feedback) and mean, cost at most 2 %.",
        "SparseLoCo, abstract",
        "better than DiLoCo in full precision (no figure read)",
        BASE.but(codec="topk", feedback="classic"),
        BASE,
        BELOW,
        2.0,
        loss,
        note="The outer step has momentum, and the mean is made sparse a second time, which the node refuses.",
        seeds=3,
    ),
    Claim(
        "topk",
        "The same with the mean in int8, also with feedback.",
        "SparseLoCo, abstract",
        "better than DiLoCo in full precision (no figure read)",
        BASE.but(codec="topk", result_codec="int8", feedback="classic", result_feedback="classic"),
        BASE,
        BELOW,
        2.0,
        loss,
        note="The outer step has momentum.",
    ),
    Claim(
        "topk-sparseloco",
        "The same with a decay of 0.95 and without outer momentum.",
        "SparseLoCo, abstract",
        "better than DiLoCo in full precision (no figure read)",
        BASE.but(codec="topk", result_codec="fp16", feedback="decaying", **SPARSE),
        BASE,
        BELOW,
        2.0,
        loss,
        note="256 of 4,096 elements; the paper sends 64.",
    ),
    Claim(
        "topk64-sparseloco",
        "The largest 64 of 4,096 elements, with the paper's decay of 0.95 and without outer momentum.",
        "SparseLoCo, abstract",
        "better than DiLoCo in full precision (no figure read)",
        BASE.but(codec="topk64", result_codec="fp16", feedback="decaying", **SPARSE),
        BASE,
        BELOW,
        2.0,
        loss,
    ),
    Claim(
        "topk64-more-rounds",
        "The same if rounds are three times as many.",
        "SparseLoCo, abstract",
        "better than DiLoCo in full precision (no figure read)",
        BASE.but(codec="topk64", result_codec="fp16", feedback="decaying", inner_steps=10, **SPARSE),
        BASE.but(inner_steps=10),
        BELOW,
        2.0,
        loss,
        note="96 rounds instead of 32.",
        seeds=WHY_SEEDS,
    ),
]

SIMILARITY = [
    Claim(
        "similar-by-steps",
        "Pseudo-gradients are more alike if rounds are longer.",
        "DiLoCo, figure 10",
        "H 1000 above 500 above 250 (a figure only)",
        BASE.but(inner_steps=120),
        BASE,
        ABOVE,
        0.0,
        cosine,
    ),
    Claim(
        "similar-by-shards",
        "Pseudo-gradients are less alike if each worker has a different shard.",
        "DiLoCo, figure 10",
        "lower (a figure only)",
        BASE.but(**CLUSTERS),
        BASE,
        BELOW,
        0.0,
        cosine,
    ),
    Claim(
        "similar-by-workers",
        "With different shards, pseudo-gradients of eight workers are less alike than those of four.",
        "DiLoCo, figure 11",
        "lower (a figure only)",
        BASE.but(**CLUSTERS),
        BASE.but(**CLUSTERS, workers=4),
        BELOW,
        0.0,
        cosine,
    ),
]

SPEED = [
    Claim(
        "time-not-steps",
        "With speeds of 1, 1, 1/4 and 1/16, rounds of equal time are better than rounds of equal steps.",
        "DECISIONS.md, Round timing",
        "a claim of this project",
        BASE.but(workers=4, speeds=SPEEDS),
        BASE.but(workers=4, speeds=SPEEDS, policy="steps"),
        BELOW,
        note="Both have the same time, in which all wait for the slowest in rounds of equal steps.",
    ),
    Claim(
        "slow-members-help",
        "Two slow members do not harm two fast ones.",
        "DECISIONS.md, Round timing",
        "a claim of this project",
        BASE.but(workers=4, speeds=SPEEDS),
        BASE.but(workers=2),
        BELOW,
        0.5,
    ),
    Claim(
        "unequal-speeds",
        "Two slow members of four cost at most 3 % against four fast ones, although they make a third fewer steps.",
        "Asynchronous Local-SGD, table 1",
        "41.13 with very unequal speeds, 41.27 with equal ones, -0.3 %, at equal steps",
        BASE.but(workers=4, speeds=SPEEDS),
        BASE.but(workers=4),
        BELOW,
        3.0,
        note="The paper gives the slow workers more time.",
    ),
    Claim(
        "weights-by-tokens",
        "With these speeds, weights by tokens are better than equal weights.",
        "DECISIONS.md, Outer optimizer",
        "a claim of this project",
        BASE.but(workers=4, speeds=SPEEDS),
        BASE.but(workers=4, speeds=SPEEDS, weights="uniform"),
        BELOW,
    ),
]

CHAPTERS: dict[str, list[Claim]] = {
    "workers": WORKERS_CHAPTER,
    "steps": LOCAL_STEPS,
    "baselines": BASELINES,
    "outer": OUTER,
    "lost": LOST,
    "pruned": PRUNED,
    "compute": COMPUTE,
    "shards": SHARDS,
    "start": START,
    "inner": INNER,
    "overlap": OVERLAP,
    "bits": BITS,
    "similarity": SIMILARITY,
    "speeds": SPEED,
}

GRIDS: dict[str, list[Arm]] = {
    "base, inner rate": [BASE.but(inner_lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "base, outer rate and momentum": [
        BASE.but(outer_lr=lr, momentum=momentum)
        for lr, momentum in ((0.4, 0.9), (0.5, 0.8), (0.7, 0.6), (0.7, 0.8), (0.7, 0.9), (1.0, 0.6))
    ],
    "one worker, inner rate": [PLAIN.but(inner_lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "one worker with outer step": [
        BASE.but(workers=1, outer_lr=lr, momentum=momentum)
        for lr, momentum in ((0.3, 0.6), (0.5, 0.6), (0.7, 0.6), (1.0, 0.6), (0.3, 0.8), (0.7, 0.3), (1.0, 0.3))
    ],
    "serial, inner rate": [SERIAL.but(inner_lr=lr) for lr in (1e-3, 2e-3, 4e-3)],
    "data parallel, inner rate": [DATA_PARALLEL.but(inner_lr=lr) for lr in (2e-3, 4e-3, 8e-3, 16e-3)],
    "Muon, inner rate": [MUON.but(inner_lr=lr) for lr in (2e-3, 4e-3, 8e-3, 16e-3, 32e-3)],
    "one batch of 32, inner rate": [at_equal_tokens(1).but(inner_lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "two workers with 16 each, inner rate": [at_equal_tokens(2).but(inner_lr=lr) for lr in (1e-3, 2e-3, 4e-3, 8e-3)],
    "outer SGD": [OUTER_SGD.but(outer_lr=lr) for lr in (0.7, 1.0, 1.5, 2.0)],
    "outer momentum": [
        OUTER_MOMENTUM.but(outer_lr=lr, momentum=momentum)
        for lr, momentum in ((0.4, 0.6), (0.7, 0.6), (1.0, 0.6), (1.0, 0.3), (0.4, 0.8))
    ],
    "outer Adam": [
        OUTER_ADAM.but(outer_lr=lr, adam_eps=eps)
        for lr, eps in ((1e-3, 1e-8), (3e-3, 1e-8), (1e-2, 1e-8), (3e-2, 1e-8), (0.1, 0.1), (0.3, 0.1))
    ],
    "H 120, outer rate and momentum": [
        BASE.but(inner_steps=120, outer_lr=lr, momentum=momentum)
        for lr, momentum in ((0.7, 0.6), (0.7, 0.3), (1.0, 0.3))
    ],
    "H 480, outer rate and momentum": [
        BASE.but(inner_steps=480, outer_lr=lr, momentum=momentum)
        for lr, momentum in ((0.7, 0.6), (0.7, 0.3), (1.0, 0.0))
    ],
    "6 of 30 steps late, momentum": [BASE.but(tau=6, momentum=momentum) for momentum in (0.6, 0.8, 0.9)],
    "29 of 30 steps late, momentum": [
        BASE.but(tau=INNER_STEPS - 1, merge="correction", momentum=momentum) for momentum in (0.4, 0.6, 0.8)
    ],
    "SparseLoCo, outer rate": [
        BASE.but(codec="topk", result_codec="fp16", feedback="decaying", optimizer="sgd", outer_lr=lr)
        for lr in (0.7, 1.0, 1.5, 2.0, 3.0)
    ],
}
"""Settings to compare, with seeds that no claim uses, before the arms of the claims are chosen."""
GRID_SEEDS = (1000, 1001)
