"""Training: the forwards trained are those that draft, the losses are the references', a killed run resumes."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from workbench.drafters.eagle3 import Eagle3Drafter
from workbench.drafters.nets import Eagle3Net, MedusaNet, NetConfig, ParallelSpecNet, SpecBlockNet
from workbench.drafters.parallelspec import ParallelSpecDrafter
from workbench.drafters.specblock import SpecBlockDrafter
from workbench.errors import InputError
from workbench.training.data import LOOP_NGRAM, LOOP_RUN, Batch, FeatureStore, batches, loop_cut
from workbench.training.loop import TrainConfig, Trainer
from workbench.training.losses import rank_loss, soft_cross_entropy, tier_of_rank
from workbench.training.muon import Muon, orthogonalise
from workbench.training.objectives import (
    ObjectiveConfig,
    Readings,
    block_loss,
    eagle3_objective,
    keep_kv,
    later_block,
    medusa_objective,
    parallelspec_objective,
    specblock_objective,
)
from workbench.training.rankfit import RankFitConfig, collect_rows, fit_rank_head
from workbench.training.statefile import append_metrics, read_metrics, trim_metrics
from workbench.tree import Starts

V, VD, H, L, P = 50, 30, 16, 14, 4  # target and draft vocabulary, width, answer length with prompt, prompt length
EXACT = 1e-9  # float64: sums of a few hundred terms of size one, so 1e-9 leaves four digits of slack


def config(n_layers: int = 1, **switches: bool) -> NetConfig:
    return NetConfig(H, 4, 2, 4, 24, V, VD, n_layers=n_layers, n_slots=3, **switches)


@pytest.fixture(autouse=True)
def _double() -> None:
    torch.set_default_dtype(torch.float64)
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(torch.float32)


def make_batch(n: int = 2, is_all_in_vocab: bool = True) -> Batch:
    generator = torch.Generator().manual_seed(5)
    is_label = torch.zeros(n, L, dtype=torch.bool)
    is_label[:, P - 1 : L - 1] = True
    soft_p = torch.rand(n, L, 4, generator=generator)
    soft_p[..., 0] += 1
    in_vocab = is_label.clone()
    if not is_all_in_vocab:
        in_vocab &= torch.rand(n, L, generator=generator) > 0.3
    return Batch(
        feat=torch.randn(n, L, 3 * H, generator=generator),
        final=torch.randn(n, L, H, generator=generator),
        tok=torch.randint(0, V, (n, L), generator=generator),
        is_label=is_label,
        in_vocab=in_vocab,
        soft_id=torch.stack([torch.randperm(VD, generator=generator)[:4] for _ in range(n * L)]).view(n, L, 4),
        soft_p=soft_p / soft_p.sum(-1, keepdim=True),
        n_positions=int(is_label.sum()),
    )


def root_start() -> Starts:
    minus = np.full((1, 1), -1, np.int16)
    node = np.full((1, 1), -1, np.int32)
    return Starts(node=node, token=node, level=minus, start=minus, slot=minus, rank=minus, n=np.ones(1, np.int32))


def start_at(level: int, slot: int, token: int) -> Starts:
    def one(x: int, dtype: type) -> np.ndarray:
        return np.full((1, 1), x, dtype)

    return Starts(
        node=one(0, np.int32), token=one(token, np.int32), level=one(level, np.int16), start=one(0, np.int16),
        slot=one(slot, np.int16), rank=one(1, np.int16), n=np.ones(1, np.int32),
    )  # fmt: skip


def opened(drafter, batch: Batch, n_pairs: int):
    """The drafter's state after the first `n_pairs` pairs of answer 0."""
    state = drafter.open(batch.tok[0, :1].tolist(), L)
    drafter.observe(state, batch.feat[0, :n_pairs], batch.final[0, :n_pairs], batch.tok[0, 1 : n_pairs + 1].tolist())
    return state


def test_specblock_trains_the_forward_that_drafts():
    """Blocks 1, 2, 3 of the teacher-forced training forward equal the drafter's cached blocks, hidden for hidden."""
    net, embed, batch = SpecBlockNet(config(2)), torch.randn(V, H), make_batch()
    kv: list = []
    position = torch.arange(L - 1).expand(2, -1)
    hidden = net(batch.feat[:, :-1], embed[batch.tok[:, 1:]], position, [keep_kv(kv), keep_kv(kv)], True)
    rows = torch.tensor([[4, 6, 8], [5, 7, 9]])
    second, chain, _ = later_block(net, batch, embed, hidden, [(list(kv), 0)], rows, None, 2, 2, kv)
    inner = torch.tensor([[2, 0], [1, 1]])
    third, _, rows3 = later_block(net, batch, embed, second, chain, rows, inner, 1, 3, kv)
    assert rows3.tolist() == [[8, 4], [7, 7]]

    drafter = SpecBlockDrafter(net, embed)
    for column, i in enumerate((8, 4)):
        state = opened(drafter, batch, i + 1)
        drafter.expand(state, 0, root_start(), 2)
        torch.testing.assert_close(state.hidden[0], hidden[0, i], rtol=EXACT, atol=EXACT)
        drafter.expand(state, 1, start_at(0, 1, int(batch.tok[0, i + 3])), 2)
        torch.testing.assert_close(state.hidden[1], second[0, 2 if i == 8 else 0], rtol=EXACT, atol=EXACT)
        drafter.expand(state, 2, start_at(1, 0, int(batch.tok[0, i + 4])), 2)
        torch.testing.assert_close(state.hidden[2], third[0, column], rtol=EXACT, atol=EXACT)


def test_eagle_training_time_test_equals_drafting(monkeypatch):
    """Every unrolled step's hidden equals drafting one token after another with a cache."""
    net, embed, batch = Eagle3Net(config()), torch.randn(V, H), make_batch()
    seen: list[torch.Tensor] = []
    forward = Eagle3Net.forward

    def spy(self, *args):
        seen.append(forward(self, *args))
        return seen[-1]

    monkeypatch.setattr(Eagle3Net, "forward", spy)
    monkeypatch.setattr("workbench.training.objectives.pick_rows", lambda *_: torch.tensor([[5, 7], [6, 8]]))
    eagle3_objective(net, embed, ObjectiveConfig(n_steps=4))(batch, torch.Generator())
    monkeypatch.undo()
    drafter = Eagle3Drafter(net, embed)
    for column, i in enumerate((5, 7)):
        state = opened(drafter, batch, i + 1)
        drafter.expand(state, 0, root_start(), 2)
        torch.testing.assert_close(state.hidden[0, 0], seen[0][0, i], rtol=EXACT, atol=EXACT)
        for step in range(1, 4):
            drafter.expand(state, step, start_at(step - 1, 0, int(batch.tok[0, i + 1 + step])), 2)
            torch.testing.assert_close(state.hidden[step, 0], seen[step][0, column], rtol=EXACT, atol=EXACT)


def test_parallelspec_trains_the_pass_that_drafts(monkeypatch):
    net, embed, batch = ParallelSpecNet(config()), torch.randn(V, H), make_batch()
    seen: list[torch.Tensor] = []
    forward = ParallelSpecNet.forward

    def spy(self, *args):
        seen.append(forward(self, *args))
        return seen[-1]

    monkeypatch.setattr(ParallelSpecNet, "forward", spy)
    monkeypatch.setattr("workbench.training.objectives.pick_rows", lambda *_: torch.tensor([[5, 7], [6, 8]]))
    parallelspec_objective(net, embed, ObjectiveConfig())(batch, torch.Generator())
    monkeypatch.undo()
    drafter = ParallelSpecDrafter(net, embed)
    for column, i in enumerate((5, 7)):
        expansion = drafter.expand(opened(drafter, batch, i + 1), 0, root_start(), VD)
        masked = seen[1].unflatten(1, (-1, 2))[0, column]  # [K-1, H]
        hidden = torch.cat([seen[0][0, i : i + 1], masked])
        logp = net.lm_head(net.norm(hidden)).log_softmax(-1)
        order = torch.from_numpy(expansion.token[0, 0].astype(np.int64))
        expected = (logp.gather(-1, order) * 1024).round().detach().numpy()
        assert np.abs(expansion.logp[0, 0] - expected).max() <= 1  # a step's rounding edge may differ by one


def test_soft_cross_entropy_equals_autograd():
    """Value and both gradients against plain log_softmax; more rows than one chunk."""
    n = 700
    hidden, head = torch.randn(n, H, requires_grad=True), torch.randn(VD, H, requires_grad=True)
    ids = torch.stack([torch.randperm(VD)[:5] for _ in range(n)])
    p = torch.rand(n, 5)
    weight = torch.rand(n)
    loss, reading = soft_cross_entropy(hidden, head, ids, p, weight, has_features=True)
    loss.backward()
    got = hidden.grad.clone(), head.grad.clone()
    hidden.grad = head.grad = None
    logits = hidden @ head.T
    expected = -(weight[:, None] * p * logits.log_softmax(-1).gather(-1, ids)).sum()
    expected.backward()
    torch.testing.assert_close(loss, expected, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(got[0], hidden.grad, rtol=EXACT, atol=EXACT)
    torch.testing.assert_close(got[1], head.grad, rtol=EXACT, atol=EXACT)
    order = logits.argsort(-1, descending=True)
    rank = (order == ids[:, :1]).nonzero()[:, 1] + 1
    assert torch.equal(reading.rank, rank)
    assert torch.equal(reading.is_best, rank == 1)
    assert reading.features.shape == (n, 15)


def test_rank_loss_by_hand():
    """One row, true tier 2, uniform logits (guess tier 0): weight 1 + 2 + 2 = 5 over weight 1; cross-entropy ln 4."""
    loss = rank_loss(torch.zeros(1, 4), torch.tensor([2]), 0.0)
    assert float(loss) == pytest.approx(5 * np.log(4))
    # the soft label of true tier 1: 1/(1+|c-1|+max(1-c,0))^2 = [1/9, 1, 1/4, 1/9]
    logits = torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    soft = np.array([1 / 9, 1, 1 / 4, 1 / 9])
    soft /= soft.sum()
    logp = np.array([0, 3.0, 0, 0]) - np.log(3 + np.exp(3))
    assert float(rank_loss(logits, torch.tensor([1]), 0.0)) == pytest.approx(-(soft * logp).sum())
    assert tier_of_rank(torch.tensor([1, 2, 4, 5, 10, 11, 900])).tolist() == [0, 1, 1, 2, 2, 3, 3]


def test_rank_loss_pools_slots_and_counts_tiers_in_each():
    """One sum over another, not a sum of slots' means: 3 rows of slot 0 and 1 of slot 1, uniform logits, guess tier 0.

    Cross-entropy ln 4 each; distances of tiers 0, 0, 2 and 1: 1, 1, 5 and 3. A budget of 1 halves slot 0's two rows of
    tier 0; the rows of tiers 2 and 1 are alone in their slots.
    """
    logits, tier, slot = torch.zeros(4, 4), torch.tensor([0, 0, 2, 1]), torch.tensor([0, 0, 0, 1])
    assert float(rank_loss(logits, tier, 0.0, slot)) == pytest.approx((1 + 1 + 5 + 3) / 4 * np.log(4))
    assert float(rank_loss(logits, tier, 1.0, slot)) == pytest.approx((0.5 + 0.5 + 5 + 3) / 3 * np.log(4))
    same = torch.tensor([0, 0, 2, 0])  # tier 0 in slot 1 too: its row is no part of slot 0's count
    assert float(rank_loss(logits, same, 1.0, slot)) == pytest.approx((0.5 + 0.5 + 5 + 1) / 3 * np.log(4))
    assert float(rank_loss(logits, same, 1.0)) == pytest.approx((1 / 3 * 3 + 5) / 2 * np.log(4))


@pytest.mark.parametrize("share", [1, 0.4])
def test_block_loss_against_a_slow_one(share):
    """The whole loss of a block, draft and rank terms, row by row in plain words."""
    net, batch = SpecBlockNet(config(2)), make_batch(is_all_in_vocab=share == 1)
    hidden = torch.randn(2, L - 1, 3, H)
    settings = ObjectiveConfig(divisor_floor=0.0)
    starts, rows = batch.is_label[:, :-1], torch.arange(L - 1).expand(2, -1)
    got = block_loss(net, batch, settings, hidden, rows, starts, 0, "b1", Readings())
    logits = net.lm_head(net.norm(hidden))
    terms: list[list[torch.Tensor]] = [[], [], []]
    rank_logits, tiers = [], []
    for b, i in starts.nonzero().tolist():
        for k in range(3):
            j = i + 1 + k  # the target's distribution at index j is over token j + 1 = i + 2 + k
            if j >= L - 1 or not batch.in_vocab[b, j]:
                break
            row, ids = logits[b, i, k], batch.soft_id[b, j]
            terms[k].append(-(batch.soft_p[b, j] * row.log_softmax(-1)[ids]).sum())
            rank_logits.append(net.rank_logits(net.norm(hidden[b, i, k]), row))
            tiers.append(tier_of_rank(1 + (row > row[ids[0]]).sum()))
            if row.argmax() != ids[0]:
                break
    expected = sum(0.8**k * torch.stack(t).mean() for k, t in enumerate(terms) if t)
    expected = expected + rank_loss(torch.stack(rank_logits), torch.stack(tiers), 0.0)
    torch.testing.assert_close(got, expected, rtol=EXACT, atol=EXACT)


def test_parallelspec_of_one_slot_trains_its_real_rows_alone():
    net = ParallelSpecNet(dataclasses.replace(config(), n_slots=1))
    loss, readings = parallelspec_objective(net, torch.randn(V, H), ObjectiveConfig())(make_batch(), torch.Generator())
    assert list(readings.rows) == ["s0"] and float(loss.detach()) > 0


@pytest.mark.parametrize("has_valid_prefix", [True, False])
def test_valid_prefix_rows_against_brute_force(has_valid_prefix):
    net, batch = SpecBlockNet(config(2)), make_batch(is_all_in_vocab=False)
    hidden = torch.randn(2, L - 1, 3, H)
    is_start, rows = batch.is_label[:, :-1], torch.arange(L - 1).expand(2, -1)
    readings = Readings()
    settings = ObjectiveConfig(has_valid_prefix=has_valid_prefix)
    block_loss(net, batch, settings, hidden, rows, is_start, 0, "b1", readings)
    best = net.lm_head(net.norm(hidden)).argmax(-1)
    expected = np.zeros(3)
    for b in range(2):
        for i in range(L - 1):
            if not is_start[b, i]:
                continue
            for k in range(3):
                j = i + 1 + k
                if j >= L or not batch.in_vocab[b, j]:
                    if has_valid_prefix:
                        break
                    continue
                expected[k] += 1
                if has_valid_prefix and best[b, i, k] != batch.soft_id[b, j, 0]:
                    break
    assert [readings.rows[f"b1s{k}"] for k in range(3)] == expected.tolist()
    assert readings.confusion.sum() == expected.sum()


def test_no_gradient_from_the_rank_head_reaches_the_drafter():
    net, embed, batch = SpecBlockNet(config(2)), torch.randn(V, H), make_batch()
    logits = net.rank_logits(net.norm(net.layers[0].mlp(embed[:7])), torch.randn(7, VD))
    rank_loss(logits, torch.zeros(7, dtype=torch.int64), 0.0).backward()
    assert net.rank_head[0].weight.grad is not None
    assert all(p.grad is None for n, p in net.named_parameters() if not n.startswith("rank_head"))
    del batch


def test_loop_cut():
    assert loop_cut(np.arange(200)) == 200
    period = np.tile(np.arange(10), 30)
    # 9-grams first recur at index 10; the run reaches LOOP_RUN at index 10 + LOOP_RUN - 1, whose gram ends 9 later
    assert loop_cut(period) == 10 + LOOP_RUN - 1 + LOOP_NGRAM
    assert loop_cut(period[:15]) == 15


def write_store(root: Path, n_answers: int = 24, n_shards: int = 2) -> FeatureStore:
    """A store whose next token is a function of the last one, so that it can be learnt: t + 1 modulo 12."""
    generator = np.random.default_rng(3)
    size = 8
    table = generator.standard_normal((V, 3 * size))
    answer_id = 0
    for shard in range(n_shards):
        rows: dict[str, list] = {k: [] for k in ("feat", "final", "tok", "soft_id", "soft_p")}
        per = n_answers // n_shards
        lengths, ids = [], []
        for _ in range(per):
            length = int(generator.integers(12, 20))
            tok = (generator.integers(12) + np.arange(length)) % 12
            rows["feat"].append(table[tok])
            rows["final"].append(table[tok][:, :size])
            rows["tok"].append(tok)
            following = (tok[P - 1 : -1] + 1) % 12
            rows["soft_id"].append(np.stack([following, (following + 5) % 12], -1))
            rows["soft_p"].append(np.tile([0.9, 0.1], (len(following), 1)))
            lengths.append(length)
            ids.append(answer_id)
            answer_id += 1
        folder = root / f"{shard:04d}"
        folder.mkdir(parents=True)
        arrays = {k: np.concatenate(v) for k, v in rows.items()}
        arrays |= {"length": np.array(lengths), "prompt_length": np.full(per, P), "answer_id": np.array(ids)}
        arrays |= {"kind": np.array(["chat"] * per), "temperature": np.zeros(per, np.float32)}
        types = {"feat": np.float16, "final": np.float16, "tok": np.uint32, "soft_id": np.uint32, "soft_p": np.float16}
        for name, array in arrays.items():
            np.save(folder / f"{name}.npy", array.astype(types.get(name, array.dtype)))
    return FeatureStore(root)


def trainer(tmp_path: Path, kind: str, n_positions: int, name: str = "run") -> Trainer:
    root = tmp_path / "store"
    store = FeatureStore(root) if root.exists() else write_store(root)
    torch.set_default_dtype(torch.float32)
    net = NetConfig(8, 2, 1, 4, 16, V, 20, n_layers=2 if kind == "specblock" else 1, n_slots=3)
    settings = TrainConfig(kind, net, n_positions=n_positions, batch_tokens=120, matrix_lr=2e-2, head_lr=1e-2)
    torch.manual_seed(1)
    embed = torch.randn(V, 8)
    return Trainer(settings, store, embed, embed, torch.ones(8), tmp_path / name)


def test_store_split_vocabulary_and_batches(tmp_path):
    store = write_store(tmp_path / "store", n_answers=60)
    train, held_out = store.split(0.2)
    assert len(train) + len(held_out) == 60
    assert held_out
    assert {a.answer_id for a in train}.isdisjoint({a.answer_id for a in held_out})
    plan = batches(train, 120, seed=0, epoch=1)
    assert sorted(a.answer_id for group in plan for a in group) == sorted(a.answer_id for a in train)
    assert batches(train, 120, 0, 1) == plan
    assert batches(train, 120, 0, 2) != plan
    ids = store.draft_vocabulary(train, 15, V)
    # tokens 0..11 occur; the other three places go to the lowest ids that never occur
    assert ids.tolist() == list(range(15))
    batch = store.batch(train[:2], torch.ones(24), np.where(np.arange(V) < 6, np.arange(V), -1))
    a = train[0]
    tok = store.shards[a.shard]["tok"][a.row : a.row + a.length]
    assert batch.tok[0, : a.length].tolist() == tok.tolist()
    assert batch.is_label[0].nonzero().flatten().tolist() == list(range(P - 1, a.length - 1))
    j = P - 1
    wanted = [int(t) for t in ((tok[j] + 1) % 12, (tok[j] + 6) % 12)]
    assert bool(batch.in_vocab[0, j]) == (wanted[0] < 6)
    kept = [0.9 * (wanted[0] < 6), 0.1 * (wanted[1] < 6)]
    assert batch.soft_p[0, j].tolist() == pytest.approx([x / sum(kept) for x in kept], abs=1e-3)  # fp16 on disk


@pytest.mark.parametrize("kind", ["specblock", "eagle3", "parallelspec", "medusa"])
def test_every_objective_learns_a_learnable_text(tmp_path, kind):
    """The next token is the last one plus one: after a short training every slot must know it on held-out answers."""
    run = trainer(tmp_path, kind, 30_000)
    run.run(save_every_s=1e9, evaluate_every_s=1e9)
    got = run.evaluate()
    accuracy = {k: got.hit[k] / got.rows[k] for k in got.rows}
    # one residual block of width 8 under a frozen random head cannot tell all 12 tokens apart: well above 1/12 suffices
    assert min(accuracy.values()) > (0.35 if kind == "medusa" else 0.95), accuracy
    if kind == "specblock":
        assert got.confusion[0, 0] > 0.95 * got.confusion.sum()


def test_resume_after_a_kill_equals_an_uninterrupted_run(tmp_path):
    whole = trainer(tmp_path, "eagle3", 1500, "whole")
    whole.run(save_every_s=1e9, evaluate_every_s=1e9)
    first = trainer(tmp_path, "eagle3", 1500, "cut")
    plan = batches(first.train, 120, 0, 0)
    for group in plan[:3]:
        first.step(group)
        first.index += 1
    first.save()
    first.step(plan[3])  # lost with the kill: never saved
    again = trainer(tmp_path, "eagle3", 1500, "cut")
    assert again.index == 3
    again.run(save_every_s=1e9, evaluate_every_s=1e9)
    for (name, a), b in zip(whole.net.named_parameters(), again.net.parameters(), strict=True):
        assert torch.equal(a, b), name
    with pytest.raises(InputError, match="other settings"):
        trainer(tmp_path, "eagle3", 7, "cut")


def test_a_grown_store_leaves_a_resumed_run_its_vocabulary_and_answers(tmp_path):
    first = trainer(tmp_path, "eagle3", 1500, "cut")
    first.step(batches(first.train, 120, 0, 0)[0])
    first.save()
    new = tmp_path / "store" / "0002"
    shutil.copytree(tmp_path / "store" / "0001", new)
    tok = np.load(new / "tok.npy")
    np.save(new / "tok.npy", tok + 30)  # the most frequent tokens of the grown store are other ones
    again = trainer(tmp_path, "eagle3", 1500, "cut")
    assert len(again.store.shards) == 2
    assert again.train == first.train
    assert again.draft_ids.tolist() == first.draft_ids.tolist()
    assert trainer(tmp_path, "eagle3", 1500, "fresh").draft_ids.tolist() != first.draft_ids.tolist()
    shutil.rmtree(new)
    shutil.rmtree(tmp_path / "store" / "0001")
    with pytest.raises(InputError, match="holds 1 feature shards; 2 or more are needed"):
        trainer(tmp_path, "eagle3", 1500, "cut")


def test_a_run_in_the_folder_that_is_another_one(tmp_path):
    first = trainer(tmp_path, "eagle3", 1500, "cut")
    first.save()
    settings, ids = first.config, first.draft_ids
    given = (settings, first.store, first.embed, first.embed, torch.ones(8), tmp_path / "cut")
    assert Trainer(*given, draft_ids=ids).draft_ids.tolist() == ids.tolist()
    with pytest.raises(InputError, match="another draft vocabulary"):
        Trainer(*given, draft_ids=ids[::-1].copy())
    (tmp_path / "store" / "store.json").write_text('{"target": "0"}')
    with pytest.raises(InputError, match="other features"):
        trainer(tmp_path, "eagle3", 1500, "cut")
    for content in (b"", b"PK\x03\x04 torn", first.out.joinpath("training_state.pt").read_bytes()[:-300]):
        first.out.joinpath("training_state.pt").write_bytes(content)
        with pytest.raises(InputError, match="not a whole training state"):
            trainer(tmp_path, "eagle3", 1500, "cut")


def test_a_loss_that_is_not_finite_ends_the_run_and_keeps_the_state(tmp_path):
    run = trainer(tmp_path, "eagle3", 1500, "cut")
    run.save()
    before = run.out.joinpath("training_state.pt").read_bytes()
    with torch.no_grad():
        run.net.lm_head.weight[3, 2] = float("nan")
    with pytest.raises(InputError, match="loss of step 0 is not finite"):
        run.run(save_every_s=0)
    assert run.out.joinpath("training_state.pt").read_bytes() == before


def test_a_full_disk_keeps_the_state_before(tmp_path, monkeypatch):
    run = trainer(tmp_path, "eagle3", 1500, "cut")
    run.save()
    before = run.out.joinpath("training_state.pt").read_bytes()

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("workbench.training.statefile.os.fsync", full)
    with pytest.raises(InputError, match="No space left on device.*the state written before is whole"):
        run.save()
    assert run.out.joinpath("training_state.pt").read_bytes() == before


def test_metrics_of_steps_to_be_run_again_are_dropped(tmp_path):
    for n_steps in (20, 40, 60):
        append_metrics(tmp_path, {"split": "train", "n_steps": n_steps})
    with (tmp_path / "metrics.jsonl").open("a") as file:
        file.write('{"split": "tr')
    trim_metrics(tmp_path, 45)
    assert [json.loads(line)["n_steps"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()] == [20, 40]
    trim_metrics(tmp_path, 0)
    assert read_metrics(tmp_path) == []


@pytest.mark.parametrize(("share", "n", "n_held"), [(0.2, 2, 1), (0.0001, 60, 1), (0.99999, 60, 59), (0.0, 1, 0)])
def test_neither_side_of_the_split_is_empty(tmp_path, share, n, n_held):
    store = write_store(tmp_path / "store", n_answers=n, n_shards=1)
    train, held_out = store.split(share)
    assert (len(train), len(held_out)) == (n - n_held, n_held)
    assert sorted(a.answer_id for a in train + held_out) == list(range(n))
    assert batches([], 100, 0, 0) == []
    if n == 1:
        with pytest.raises(InputError, match=r"holds 1 answer\(s\); two are needed"):
            store.split(0.5)


def test_exported_network_takes_raw_features(tmp_path):
    run = trainer(tmp_path, "specblock", 1000)
    run.scale = torch.rand(24) + 0.5
    batch = run.store.batch(run.train[:1], torch.ones(24), run.to_draft)
    layer, out = run.net.input_layer, run.exported().input_layer
    a, b = layer.condition_proj(batch.feat / run.scale), out.condition_proj(batch.feat)
    torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)  # float32: one division moved across a sum of 24 terms


def test_muon_moves_by_near_orthogonal_updates():
    torch.manual_seed(0)
    for shape in ((12, 30), (30, 12), (16, 16)):
        singular = torch.linalg.svdvals(orthogonalise(torch.randn(shape)))
        # the quintic's fixed points lie in about [0.68, 1.13]; small singular values may still be rising
        assert 0.3 < float(singular.min()) and float(singular.max()) < 1.25
    w = torch.nn.Parameter(torch.zeros(12, 30))
    optimiser = Muon([w], lr=0.1)
    w.grad = torch.randn(12, 30)
    optimiser.step()
    assert float(w.detach().norm()) == pytest.approx(0.1 * 0.2 * 30**0.5 * 12**0.5, rel=0.3)


def test_medusa_objective_by_hand():
    """Zero residual blocks pass the final hidden through: head i's loss is the target head's own at index + 1 + i."""
    net, head, batch = MedusaNet(2, 1, H, None), torch.randn(VD, H), make_batch(1)
    loss, readings = medusa_objective(net, head, ObjectiveConfig())(batch, torch.Generator())
    logp = (batch.final[0] @ head.T).log_softmax(-1)
    expected = 0.0
    for i in range(2):
        terms = [
            -(batch.soft_p[0, j] * logp[j - 1 - i][batch.soft_id[0, j]]).sum() for j in range(P - 1 + 1 + i, L - 1)
        ]
        expected += 0.8**i * float(sum(terms)) / len(terms)
        assert readings.rows[f"s{i}"] == len(terms)
    assert float(loss) == pytest.approx(expected, rel=EXACT)


def test_specblock_objective_ablations_run_the_switches():
    batch, embed = make_batch(), torch.randn(V, H)
    losses = {}
    for name in ("none", "has_layer_shift", "has_prefix_broadcast", "has_rank_head"):
        torch.manual_seed(3)
        net = SpecBlockNet(config(2, **({} if name == "none" else {name: False})))
        objective = specblock_objective(net, embed, ObjectiveConfig())
        losses[name] = float(objective(batch, torch.Generator().manual_seed(0))[0].detach())
    assert len(set(losses.values())) == 4


def test_rank_head_fit_beats_the_majority_on_rows_it_was_not_fitted_to():
    """Tiers read off one input: the fitted head must find it; an unfitted head does not."""
    torch.set_default_dtype(torch.float32)
    net = SpecBlockNet(config(2))
    rows = torch.randn(4000, H + 15)
    tier = torch.bucketize(rows[:, 0], torch.tensor([-0.5, 0.3, 1.0]))
    parts = [(rows[i : i + 200], tier[i : i + 200]) for i in range(0, 3000, 200)]
    before = float((net.rank_head(rows[3000:]).argmax(-1) == tier[3000:]).float().mean())
    fit_rank_head(net, parts, RankFitConfig(lr=1e-2), 0.0, seed=0)
    after = float((net.rank_head(rows[3000:]).argmax(-1) == tier[3000:]).float().mean())
    # the loss shifts doubtful rows up a tier, so the borders are not hit exactly; the majority tier holds 31 %
    assert before < 0.5 < 0.75 < after


def test_collected_rows_are_the_slots_a_draft_reaches():
    net, embed, batch = SpecBlockNet(config(2)), torch.randn(V, H), make_batch()
    objective = specblock_objective(net, embed, ObjectiveConfig())
    _, readings = objective(batch, torch.Generator().manual_seed(0))
    rows, tier = collect_rows(objective, batch, torch.Generator().manual_seed(0))
    assert len(rows) == len(tier) == sum(readings.rows.values())
    confusion = torch.zeros(4, 4)
    confusion.index_put_((tier, net.rank_head(rows).argmax(-1)), torch.ones(len(tier)), accumulate=True)
    assert torch.equal(confusion.int(), readings.confusion.int())
