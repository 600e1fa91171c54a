"""Rows and blocks, without a model."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dejavu.engine.scheduler import Request, Scheduler
from dejavu.errors import InputError


class Pool:
    """Blocks that notice being handed out twice."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.free = set(range(num_blocks))

    @property
    def free_blocks(self) -> int:
        return len(self.free)

    def allocate(self, blocks: int) -> list[int]:
        assert blocks <= len(self.free)
        return [self.free.pop() for _ in range(blocks)]

    def release(self, blocks: list[int]) -> None:
        assert self.free.isdisjoint(blocks)
        self.free.update(blocks)


def make(blocks: int = 8, rows: int = 4, length: int = 64) -> tuple[Scheduler, Pool]:
    pool = Pool(blocks)
    return Scheduler(pool, block_size=16, max_rows=rows, max_length=length), pool


def add(
    scheduler: Scheduler, prompt: int, max_tokens: int | None = None, client: str = ""
) -> Request:
    request = Request((1,) * prompt, scheduler.check(prompt, max_tokens), client=client)
    scheduler.add(request)
    return request


def test_limit_is_the_smaller_of_context_and_max_tokens() -> None:
    scheduler, _ = make()
    assert scheduler.check(10, 5) == 15
    assert scheduler.check(10, None) == 64
    assert scheduler.check(63, 500) == 64


def test_what_can_never_run_is_refused_with_both_numbers() -> None:
    scheduler, _ = make(blocks=2)
    with pytest.raises(InputError, match=r"64 tokens.*context is 64"):
        scheduler.check(64, 1)
    with pytest.raises(InputError, match=r"33 tokens.*holds 32"):
        scheduler.check(30, 3)
    assert scheduler.check(30, 2) == 32


def test_first_come_first_served_and_nobody_overtakes() -> None:
    scheduler, pool = make(blocks=4, rows=4)
    small, large, late = add(scheduler, 10, 1), add(scheduler, 60, 4), add(scheduler, 10, 1)
    assert scheduler.admit() == [small]
    assert pool.free_blocks == 3
    assert scheduler.admit() == []
    scheduler.finish(small)
    assert scheduler.admit() == [large]
    assert scheduler.admit() == []
    scheduler.finish(large)
    assert scheduler.admit() == [late]


def test_a_prompt_that_waits_for_memory_is_not_next() -> None:
    scheduler, _ = make(blocks=4)
    assert not scheduler.reading
    first = add(scheduler, 60)
    assert scheduler.reading
    scheduler.admit()
    scheduler.advance(first, 60)
    add(scheduler, 20)
    assert not scheduler.reading, "a row is free, and no block"
    scheduler.finish(first)
    assert scheduler.reading


def test_clients_take_turns() -> None:
    scheduler, _ = make(blocks=8, rows=1)
    many = [add(scheduler, 4, 4, client="many") for _ in range(3)]
    one = [add(scheduler, 4, 4, client="one") for _ in range(2)]
    order = []
    while scheduler.waiting:
        (request,) = scheduler.admit()
        order.append(request)
        scheduler.finish(request)
    assert order == [many[0], one[0], many[1], one[1], many[2]]


def test_pieces_of_prompts_take_turns_and_are_cut_alike() -> None:
    scheduler, _ = make(blocks=8, rows=4)
    long, short = add(scheduler, 40, 4), add(scheduler, 5, 4)
    scheduler.admit()
    cuts: list[list[tuple[Request, int]]] = []
    while pieces := scheduler.next_prompts(16, 4):
        cuts.append(pieces)
        for request, end in pieces:
            scheduler.advance(request, end)
    assert cuts == [[(long, 16)], [(short, 5)], [(long, 32)], [(long, 40)]]
    tiny = [add(scheduler, 1, 1) for _ in range(2)]
    scheduler.admit()
    assert scheduler.next_prompts(16, 8) == [(tiny[0], 1), (tiny[1], 1)]
    assert scheduler.next_prompts(16, 9) == [(tiny[0], 1)]
    scheduler.finish(tiny[0])
    scheduler.advance(tiny[0], 1)
    assert scheduler.next_prompts(1, 9) == [(tiny[1], 1)]


def test_finish_is_idempotent_and_keeps_the_first_reason() -> None:
    scheduler, pool = make()
    running, waiting = add(scheduler, 4, 4), None
    scheduler.admit()
    waiting = add(scheduler, 4, 4)
    for request in (running, waiting):
        scheduler.finish(request, "stop")
        scheduler.finish(request, "length")
        assert (request.done, request.finish_reason, request.blocks) == (True, "stop", [])
    assert (scheduler.running, scheduler.waiting, pool.free_blocks) == ([], 0, 8)


@settings(max_examples=100)
@given(
    actions=st.lists(
        st.one_of(
            st.tuples(st.just("add"), st.integers(1, 63), st.integers(1, 80), st.integers(0, 2)),
            st.tuples(st.just("admit")),
            st.tuples(st.just("finish"), st.integers(0, 30)),
        ),
        max_size=60,
    )
)
def test_rows_and_blocks_are_conserved(actions: list[tuple[object, ...]]) -> None:
    scheduler, pool = make(blocks=6, rows=3)
    requests: list[Request] = []
    for action, *numbers in actions:
        if action == "add":
            prompt, wanted, client = numbers
            requests.append(add(scheduler, prompt, wanted, str(client)))  # type: ignore[arg-type]
        elif action == "admit":
            scheduler.admit()
        elif requests:
            scheduler.finish(requests[numbers[0] % len(requests)])  # type: ignore[operator]
        held = [block for request in requests for block in request.blocks]
        assert len(held) == len(set(held)) == pool.num_blocks - pool.free_blocks
        assert len(scheduler.running) <= 3
        assert scheduler.waiting + len(scheduler.running) == sum(not r.done for r in requests)
        for request in scheduler.running:
            assert len(request.blocks) * 16 >= request.limit
    while scheduler.running or scheduler.waiting:
        assert scheduler.admit() or scheduler.running, "whatever waits gets its turn"
        scheduler.finish(scheduler.running[0])
    assert pool.free_blocks == pool.num_blocks
