"""The four training objectives. Each maps a batch to (loss, readings) and knows nothing of optimisers or files.

Alignment (all drafters): pair i is (h_i, t_{i+1}); slot k of a block started at pair i predicts t_{i+2+k}, so its label
is the target's distribution at index i + 1 + k. A start counts where the pair lies in the answer.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from workbench.drafters.nets import (
    Attend,
    Eagle3Net,
    MedusaNet,
    ParallelSpecNet,
    SpecBlockNet,
    causal_attend,
    group_attention,
)
from workbench.training.data import Batch
from workbench.training.losses import HeadReading, rank_loss, soft_cross_entropy, tier_of_rank


@dataclass(frozen=True)
class ObjectiveConfig:
    """Knobs shared by the objectives; defaults from the references where they name one."""

    slot_decay: float = 0.8  # weight of slot or step k is slot_decay ** k
    share_later: float = 0.33  # share of rows that later blocks or steps train on
    n_steps: int = 5  # EAGLE-3's training-time test steps
    n_blocks: int = 3  # SpecBlock's blocks
    has_valid_prefix: bool = True  # SpecBlock's valid-prefix mask
    divisor_floor: float = 0.25  # a slot's loss is divided by at least this share of its block's rows
    rank_budget_per_tier: float = 0.0  # frequency weight of the rank loss, rows per tier and micro-batch; 0 = off


@dataclass
class Readings:
    """Sums over rows, to be added over batches: hits and rows by name, and the rank head's confusion [true, guess]."""

    hit: dict[str, float] = field(default_factory=dict)
    rows: dict[str, float] = field(default_factory=dict)
    confusion: Tensor = field(default_factory=lambda: torch.zeros(4, 4))
    rank_rows: list[tuple[Tensor, Tensor]] | None = None  # a list: keep the rank head's inputs [R, H + 15] and tiers

    def add(self, name: str, reading: HeadReading) -> None:
        self.hit[name] = self.hit.get(name, 0.0) + float(reading.is_best.sum())
        self.rows[name] = self.rows.get(name, 0.0) + len(reading.is_best)

    def merge(self, other: Readings) -> None:
        for name, rows in other.rows.items():
            self.hit[name] = self.hit.get(name, 0.0) + other.hit[name]
            self.rows[name] = self.rows.get(name, 0.0) + rows
        self.confusion += other.confusion


Objective = Callable[..., tuple[Tensor, Readings]]
"""(batch, generator) -> (loss, readings); SpecBlock's also takes the readings to add to."""


def keep_kv(store: list[tuple[Tensor, Tensor]]) -> Attend:
    """Causal attention that keeps its keys and values in `store`."""

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        store.append((k, v))
        return causal_attend(q, k, v)

    return attend


def label_at(batch: Batch, b: Tensor, index: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Labels of rows (b, index): soft ids [R, J], soft probabilities, is-a-label [R], target's best in vocabulary."""
    clipped = index.clamp(max=batch.tok.shape[1] - 1)
    inside = (index < batch.tok.shape[1]) & batch.is_label[b, clipped]
    return batch.soft_id[b, clipped], batch.soft_p[b, clipped], inside, inside & batch.in_vocab[b, clipped]


def pick_rows(is_start: Tensor, share: float, generator: torch.Generator) -> Tensor:
    """Random start indices per answer [B, R], R about `share` of the mean number of starts (with replacement)."""
    n = max(1, int(share * float(is_start.sum()) / len(is_start)))
    weight = is_start.to("cpu", torch.float32) + 1e-12  # drawn on the CPU, so that a seed means the same everywhere
    return torch.multinomial(weight, n, replacement=True, generator=generator).to(is_start.device)


def _at(x: Tensor, rows: Tensor) -> Tensor:
    """x [B, S, ...] at rows [B, R] -> [B, R, ...]."""
    return x[torch.arange(len(rows), device=rows.device)[:, None], rows]


def head_loss(
    net: SpecBlockNet | Eagle3Net | ParallelSpecNet,
    batch: Batch,
    hidden: Tensor,  # [n, H] before the final norm
    b: Tensor,
    label: Tensor,
    has_features: bool = False,
) -> tuple[Tensor, HeadReading]:
    """Summed soft cross-entropy of rows through norm and vocabulary head."""
    soft_id, soft_p, _, _ = label_at(batch, b, label)
    weight = hidden.new_ones(len(b))
    return soft_cross_entropy(net.norm(hidden), net.lm_head.weight, soft_id, soft_p, weight, has_features)


# --- SpecBlock ---------------------------------------------------------------------------------------------------


def specblock_objective(net: SpecBlockNet, embed: Tensor, config: ObjectiveConfig) -> Objective:
    """Multi-block soft cross-entropy under the valid-prefix mask, plus the rank loss on the same rows.

    The rank loss runs on the rows that survive the valid prefix (the rows a draft reaches), since only there the
    vocabulary head has been run; the released recipe masks by the rank head's own earlier hits instead.
    """

    def objective(batch: Batch, generator: torch.Generator, into: Readings | None = None) -> tuple[Tensor, Readings]:
        readings = into or Readings()
        is_start = batch.is_label[:, :-1]  # pair i counts where t_{i+1} is a token of the answer
        n_pairs = is_start.shape[1]
        kv: list[tuple[Tensor, Tensor]] = []
        position = torch.arange(n_pairs, device=is_start.device).expand(len(is_start), -1)
        attends = [keep_kv(kv) for _ in net.layers]
        hidden = net(batch.feat[:, :-1], embed[batch.tok[:, 1:]], position, attends, True)  # [B, S-1, K, H]
        rows = position
        loss = block_loss(net, batch, config, hidden, rows, is_start, 0, "b1", readings)
        chain: list[tuple[list[tuple[Tensor, Tensor]], int]] = [([(k, v) for k, v in kv], 0)]
        offset, share = 0, config.share_later
        for block in range(2, config.n_blocks + 1):
            cut = int(torch.randint(1, net.config.n_slots + 1, (1,), generator=generator))
            offset += cut
            if block == 2:
                rows, inner = pick_rows(is_start, share, generator), None
            else:
                shape = (len(rows), max(1, rows.shape[1] // 3))
                inner = torch.randint(0, rows.shape[1], shape, generator=generator).to(rows.device)
            hidden, chain, rows = later_block(net, batch, embed, hidden, chain, rows, inner, cut, offset, kv)
            counts = _at(is_start, rows)
            loss = loss + block_loss(net, batch, config, hidden, rows, counts, offset, f"b{block}", readings)
        return loss, readings

    return objective


def later_block(
    net: SpecBlockNet,
    batch: Batch,
    embed: Tensor,
    hidden: Tensor,
    chain: list[tuple[list[tuple[Tensor, Tensor]], int]],
    rows: Tensor,
    inner: Tensor | None,
    cut: int,
    offset: int,
    cross: list[tuple[Tensor, Tensor]],
) -> tuple[Tensor, list[tuple[list[tuple[Tensor, Tensor]], int]], Tensor]:
    """Run the block that leaves the last one after `cut` slots, teacher-forced, at the given rows.

    `chain` holds the K/V per layer of the blocks so far with their visible slots; `rows` [B, R] are pair indices in
    the second block; `inner` [B, R'] picks among the previous block's rows later. Returns hidden [B, R, K, H], the new
    chain and the new rows.
    """
    n_slots, n_pairs = net.config.n_slots, cross[0][0].shape[2] // net.config.n_slots
    pick = rows if inner is None else inner
    rows = rows if inner is None else torch.gather(rows, 1, inner)
    own_kv, visible = [], []
    for blocks, seen in chain[:-1] + [(chain[-1][0], cut)]:
        own_kv.append([(_rows_of(k, pick, n_slots), _rows_of(v, pick, n_slots)) for k, v in blocks])
        visible.append(seen)
    device = rows.device
    see = [torch.arange(n_slots, device=device) < seen for seen in visible]
    causal = torch.ones(n_slots, n_slots, dtype=torch.bool, device=device).tril()
    own_mask = torch.cat([s.expand(n_slots, -1) for s in see] + [causal], dim=-1)  # [K, blocks*K + K]
    context_mask = (torch.arange(n_pairs, device=device) < rows[..., None]).repeat_interleave(
        n_slots, dim=-1
    )  # [B, R, S*K]
    new_kv: list[tuple[Tensor, Tensor]] = []

    def attend_at(layer: int) -> Attend:
        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            grouped = [x.unflatten(-2, (-1, n_slots)) for x in (q, k, v)]  # [B, h, R, K, d]
            new_kv.append((k, v))
            k_own = torch.cat([kv[layer][0] for kv in own_kv] + [grouped[1]], dim=-2)
            v_own = torch.cat([kv[layer][1] for kv in own_kv] + [grouped[2]], dim=-2)
            mask = own_mask[None, None]
            out = group_attention(grouped[0], *cross[layer], k_own, v_own, mask, context_mask)
            return out.flatten(-3, -2)

        return attend

    condition = _at(hidden, pick)[:, :, cut - 1]
    token = _at_clipped(batch.tok, rows + 1 + offset)
    out = net(condition, embed[token], rows, [attend_at(i) for i in range(len(net.layers))], False)
    kept = [([(_flat(k), _flat(v)) for k, v in kv], seen) for kv, seen in zip(own_kv, visible, strict=True)]
    return out, [*kept, (new_kv, 0)], rows


def _rows_of(x: Tensor, pick: Tensor, n_slots: int) -> Tensor:
    """x [B, h, rows*K, d] at row groups pick [B, R] -> [B, h, R, K, d]."""
    x = x.unflatten(-2, (-1, n_slots))
    return x[torch.arange(len(pick), device=pick.device)[:, None], :, pick].transpose(1, 2)


def _flat(x: Tensor) -> Tensor:
    return x.flatten(-3, -2)


def _at_clipped(tok: Tensor, index: Tensor) -> Tensor:
    return torch.gather(tok, 1, index.clamp(max=tok.shape[1] - 1))


def block_loss(
    net: SpecBlockNet,
    batch: Batch,
    config: ObjectiveConfig,
    hidden: Tensor,  # [B, R, K, H]
    rows: Tensor,  # [B, R] pair index of each row
    is_start: Tensor,  # bool [B, R]
    offset: int,
    name: str,
    readings: Readings,
) -> Tensor:
    """Loss of one block: slot by slot, a row lives while its earlier slots drafted the target's best token.

    Without the valid-prefix mask a row counts at every slot whose label is usable, whatever earlier ones were.
    """
    b, r = is_start.nonzero(as_tuple=True)
    start_ok = label_at(batch, b, rows[b, r] + offset)[3] if offset else torch.ones_like(b, dtype=torch.bool)
    b, r = b[start_ok], r[start_ok]
    floor = max(1.0, config.divisor_floor * len(b))
    total = hidden.new_zeros(())
    ranked: list[tuple[Tensor, Tensor]] = []  # the rank head's inputs and true tiers, slot by slot
    for k in range(hidden.shape[-2]):
        usable = label_at(batch, b, rows[b, r] + 1 + offset + k)[3]
        b_k, r_k = b[usable], r[usable]
        x = hidden[b_k, r_k, k]
        loss, reading = head_loss(net, batch, x, b_k, rows[b_k, r_k] + 1 + offset + k, net.config.has_rank_head)
        total = total + config.slot_decay**k * loss / max(floor, len(b_k))
        readings.add(f"{name}s{k}", reading)
        if reading.features is not None and len(b_k):
            ranked.append((torch.cat([net.norm(x).detach(), reading.features], dim=-1), tier_of_rank(reading.rank)))
        if config.has_valid_prefix:
            b, r = b_k[reading.is_best], r_k[reading.is_best]
    return total + _rank_term(net, config, ranked, readings) if ranked else total


def _rank_term(
    net: SpecBlockNet, config: ObjectiveConfig, ranked: list[tuple[Tensor, Tensor]], readings: Readings
) -> Tensor:
    """The rank loss of a block: one mean over the rows of all its slots."""
    rows, tier = torch.cat([x for x, _ in ranked]), torch.cat([t for _, t in ranked])
    slot = torch.cat([torch.full_like(t, k) for k, (_, t) in enumerate(ranked)])
    if readings.rank_rows is not None:
        readings.rank_rows.append((rows, tier))
    logits = net.rank_head(rows)
    guess = logits.argmax(-1)
    readings.confusion += torch.bincount((4 * tier + guess).cpu(), minlength=16).view(4, 4)
    return rank_loss(logits, tier, config.rank_budget_per_tier, slot)


# --- EAGLE-3 -----------------------------------------------------------------------------------------------------


def eagle3_objective(net: Eagle3Net, embed: Tensor, config: ObjectiveConfig) -> Objective:
    """Training-time test: step 0 on all pairs with true features, later steps recycle the drafter's own hidden.

    At step s a row sees the step-0 keys up to its pair and its own keys of steps 1..s, at RoPE i + s.
    """

    def objective(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Readings]:
        readings = Readings()
        is_start = batch.is_label[:, :-1]
        n_pairs = is_start.shape[1]
        kv: list[tuple[Tensor, Tensor]] = []
        position = torch.arange(n_pairs, device=is_start.device).expand(len(is_start), -1)
        hidden = net(net.fc(batch.feat[:, :-1]), embed[batch.tok[:, 1:]], position, keep_kv(kv))
        rows = position
        loss = _step_loss(net, batch, hidden, rows, is_start, 0, readings)
        rows = pick_rows(is_start, config.share_later, generator)
        hidden = _at(hidden, rows)
        context_mask = torch.arange(n_pairs, device=rows.device) <= rows[..., None]  # [B, R, S-1]
        own: list[tuple[Tensor, Tensor]] = []
        for step in range(1, config.n_steps):

            def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
                own.append((k, v))
                k_own, v_own = (torch.stack([pair[i] for pair in own], dim=-2) for i in (0, 1))  # [B, h, R, s, d]
                see = torch.ones(1, 1, 1, k_own.shape[-2], dtype=torch.bool, device=q.device)
                out = group_attention(q.unsqueeze(-2), *kv[0], k_own, v_own, see, context_mask)
                return out.squeeze(-2)

            token = _at_clipped(batch.tok, rows + 1 + step)
            hidden = net(hidden, embed[token], rows + step, attend)
            counts = _at(is_start, rows)
            loss = loss + config.slot_decay**step * _step_loss(net, batch, hidden, rows, counts, step, readings)
        return loss, readings

    return objective


def _step_loss(
    net: Eagle3Net | ParallelSpecNet,
    batch: Batch,
    hidden: Tensor,  # [B, R, H]
    rows: Tensor,
    is_start: Tensor,
    step: int,
    readings: Readings,
) -> Tensor:
    """Mean soft cross-entropy of rows whose label at i + 1 + step exists and is in the draft vocabulary."""
    b, r = is_start.nonzero(as_tuple=True)
    label = rows[b, r] + 1 + step
    usable = label_at(batch, b, label)[3]
    b, r, label = b[usable], r[usable], label[usable]
    loss, reading = head_loss(net, batch, hidden[b, r], b, label)
    readings.add(f"s{step}", reading)
    return loss / max(1, len(b))


# --- ParallelSpec ------------------------------------------------------------------------------------------------


def parallelspec_objective(net: ParallelSpecNet, embed: Tensor, config: ObjectiveConfig) -> Objective:
    """Group-wise training: every real row predicts slot 0; a share of pairs also runs its K - 1 mask rows."""

    def objective(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Readings]:
        readings = Readings()
        is_start = batch.is_label[:, :-1]
        n_pairs, n_mask = is_start.shape[1], net.config.n_slots - 1
        kv: list[tuple[Tensor, Tensor]] = []
        position = torch.arange(n_pairs, device=is_start.device).expand(len(is_start), -1)
        hidden = net(net.fc(batch.feat[:, :-1]), embed[batch.tok[:, 1:]], position, keep_kv(kv))
        loss = _step_loss(net, batch, hidden, position, is_start, 0, readings)
        if n_mask == 0:
            return loss, readings
        rows = pick_rows(is_start, min(1.0, 1.5 * config.share_later), generator)
        shape = (*rows.shape, n_mask, -1)
        stream = net.mask_stream.expand(shape).flatten(1, 2)
        token_embed = net.mask_embed.expand(shape).flatten(1, 2)
        slots = (rows[..., None] + torch.arange(1, n_mask + 1, device=rows.device)).flatten(1)
        context_mask = torch.arange(n_pairs, device=rows.device) <= rows[..., None]
        causal = torch.ones(n_mask, n_mask, dtype=torch.bool, device=rows.device).tril()[None, None]

        def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            q, k, v = (x.unflatten(-2, (-1, n_mask)) for x in (q, k, v))
            return group_attention(q, *kv[0], k, v, causal, context_mask).flatten(-3, -2)

        masked = net(stream, token_embed, slots, attend).unflatten(1, (-1, n_mask))  # [B, R, K-1, H]
        counts = _at(is_start, rows)
        for j in range(1, n_mask + 1):
            step = _step_loss(net, batch, masked[:, :, j - 1], rows, counts, j, readings)
            loss = loss + config.slot_decay**j * step
        return loss, readings

    return objective


# --- Medusa ------------------------------------------------------------------------------------------------------


def medusa_objective(net: MedusaNet, head: Tensor, config: ObjectiveConfig) -> Objective:
    """Sum over heads of the soft cross-entropy through the target's frozen head at the draft vocabulary [V_d, H]."""

    def objective(batch: Batch, generator: torch.Generator) -> tuple[Tensor, Readings]:
        readings = Readings()
        is_start = batch.is_label[:, :-1]
        hidden = net.hidden(batch.final[:, :-1])  # [B, S-1, heads, H]
        position = torch.arange(is_start.shape[1], device=is_start.device).expand(len(is_start), -1)
        loss = hidden.new_zeros(())
        for i in range(net.n_heads):
            b, r = is_start.nonzero(as_tuple=True)
            label = position[b, r] + 1 + i
            usable = label_at(batch, b, label)[3]
            b, r, label = b[usable], r[usable], label[usable]
            soft_id, soft_p, _, _ = label_at(batch, b, label)
            x = hidden[b, r, i]
            part, reading = soft_cross_entropy(x, head, soft_id, soft_p, x.new_ones(len(b)))
            readings.add(f"s{i}", reading)
            loss = loss + config.slot_decay**i * part / max(1, len(b))
        return loss, readings

    return objective
