"""Plans of batches: every row once, within bounds and memory, with little padding."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from relaybatch.batching import MemoryModel, padding_share, plan_batches

MEMORY = MemoryModel(
    weight_bytes=1_000_000, kv_bytes_per_token=1_000, activation_bytes_per_token=100, row_bytes=5_000, prefill_tokens=64
)
ROOMY = 10**12

rows = st.lists(st.tuples(st.integers(0, 600), st.integers(1, 300)), max_size=120)
bounds = st.tuples(st.integers(1, 12), st.integers(0, 30)).map(lambda x: (x[0], x[0] + x[1]))


def needed(batch: np.ndarray, prompt: np.ndarray, new: np.ndarray) -> int:
    return MEMORY.batch_bytes(len(batch), int(prompt[batch].max()), int(new[batch].max()))


@settings(max_examples=150, deadline=None)
@given(rows, bounds, st.integers(0, 20_000_000))
def test_every_row_once_within_bounds_and_memory(
    rows: list[tuple[int, int]], bounds: tuple[int, int], free: int
) -> None:
    prompt, new = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    batches = plan_batches(prompt, new, bounds=bounds, memory=MEMORY, free_bytes=free)
    assert sorted(i for batch in batches for i in batch) == list(range(len(rows)))
    for batch in batches:
        assert len(batch) <= bounds[1]
        assert len(batch) == 1 or needed(batch, prompt, new) <= free
        assert list(prompt[batch]) == sorted(prompt[batch], reverse=True)
    longest = [int(prompt[batch].max()) for batch in batches]
    assert longest == sorted(longest, reverse=True)


@settings(max_examples=150, deadline=None)
@given(rows, bounds)
def test_with_memory_only_the_tail_is_below_the_least(rows: list[tuple[int, int]], bounds: tuple[int, int]) -> None:
    prompt, new = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    sizes = [len(b) for b in plan_batches(prompt, new, bounds=bounds, memory=MEMORY, free_bytes=ROOMY)]
    assert all(size >= bounds[0] for size in sizes[:-2])
    assert sum(size < bounds[0] for size in sizes) <= 1


@settings(max_examples=100, deadline=None)
@given(rows, st.integers(1, 40), st.integers(0, 20_000_000))
def test_padding_is_small_where_bounds_allow(rows: list[tuple[int, int]], most: int, free: int) -> None:
    prompt, new = np.array(rows, dtype=np.int64).reshape(-1, 2).T
    batches = plan_batches(prompt, new, bounds=(1, most), memory=MEMORY, free_bytes=free)
    assert padding_share(batches, prompt, new) <= 0.05


def test_the_plan_is_a_function_of_its_inputs() -> None:
    rng = np.random.default_rng(3)
    prompt, new = rng.integers(1, 50, 300), rng.integers(1, 9, 300)
    plans = [plan_batches(prompt, new, bounds=(2, 16), memory=MEMORY, free_bytes=ROOMY) for _ in range(2)]
    assert [batch.tolist() for batch in plans[0]] == [batch.tolist() for batch in plans[1]]


def test_rows_of_one_length_are_grouped_by_their_answers_length() -> None:
    new = np.array([5, 90, 7, 80, 6, 70, 8, 60])
    batches = plan_batches(np.full(8, 20), new, bounds=(1, 4), memory=MEMORY, free_bytes=ROOMY)
    assert [new[batch].tolist() for batch in batches] == [[90, 80, 70, 60], [8, 7, 6, 5]]


@pytest.mark.parametrize(
    ("rows", "most", "sizes"), [(17, 16, [9, 8]), (33, 16, [16, 9, 8]), (32, 16, [16, 16]), (3, 1, [1, 1, 1])]
)
def test_no_row_is_left_over_alone(rows: int, most: int, sizes: list[int]) -> None:
    batches = plan_batches(np.full(rows, 40), np.full(rows, 10), bounds=(1, most), memory=MEMORY, free_bytes=ROOMY)
    assert [len(batch) for batch in batches] == sizes


def test_a_jump_in_length_starts_a_new_batch() -> None:
    prompt = np.array([10] * 8 + [500] * 8)
    batches = plan_batches(prompt, np.full(16, 4), bounds=(1, 16), memory=MEMORY, free_bytes=ROOMY)
    assert [set(prompt[batch].tolist()) for batch in batches] == [{500}, {10}]
    assert padding_share(batches, prompt) == 0
    together = plan_batches(prompt, np.full(16, 4), bounds=(16, 16), memory=MEMORY, free_bytes=ROOMY)
    assert len(together) == 1
    assert padding_share(together, prompt) == pytest.approx(8 * 490 / (16 * 500))


def test_short_and_long_rows_get_batches_of_their_own_size() -> None:
    """A batch size that fits rows of 5 words does not fit rows of 500 (lm-evaluation-harness PR 3654)."""
    prompt, new = np.array([5] * 64 + [500] * 64), np.full(128, 20)
    free = MEMORY.batch_bytes(12, 500, 20)
    batches = plan_batches(prompt, new, bounds=(1, 64), memory=MEMORY, free_bytes=free)
    assert [len(b) for b in batches if prompt[b].min() == 500] == [12] * 5
    assert [len(b) for b in batches if prompt[b].max() == 5] == [63]  # one filled the last batch of long rows up


def test_a_row_beyond_memory_is_tried_alone() -> None:
    batches = plan_batches([9_000, 10, 10], [5, 5, 5], bounds=(2, 8), memory=MEMORY, free_bytes=1_000_000)
    assert [batch.tolist() for batch in batches] == [[0], [1, 2]]


def test_nothing_to_plan() -> None:
    assert plan_batches([], [], bounds=(1, 4), memory=MEMORY, free_bytes=ROOMY) == []
    assert padding_share([], []) == 0


@pytest.mark.parametrize("bounds", [(0, 4), (5, 4)])
def test_bounds_out_of_order_are_refused(bounds: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="bounds"):
        plan_batches([1], [1], bounds=bounds, memory=MEMORY, free_bytes=ROOMY)


def test_vectors_of_two_lengths_are_refused() -> None:
    with pytest.raises(ValueError, match="one length"):
        plan_batches([1, 2], [1], bounds=(1, 4), memory=MEMORY, free_bytes=ROOMY)
