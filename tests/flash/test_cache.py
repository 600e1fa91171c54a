"""What always holds of the cache: what was asked for is there, once, and holds its own record."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import HealthCheck, given, settings

from dejavu.errors import InputError
from dejavu.kernels.neuron_cache import NeuronCache
from dejavu.kernels.selection import Selection


@pytest.fixture
def bundle(in_file):
    return in_file("opt", "bf16", 288)[2].bundle


steps = st.lists(
    st.tuples(st.integers(0, 2), st.sets(st.integers(0, 95), max_size=40)), min_size=1, max_size=40
)


@given(steps=steps, slots=st.integers(80, 288), half_life=st.sampled_from([0.01, 1.0, 64.0]))
@settings(
    max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
def test_invariants(bundle, steps, slots, half_life):
    offsets = [bundle.offsets(layer) for layer in range(3)]
    cache = NeuronCache(
        bundle.reader(), offsets, record=bundle.record_bytes, slots=slots, half_life=half_life
    )
    raw = bundle.path.read_bytes()
    previous: tuple[int, set[int]] | None = None  # still in use while the next is fetched
    wanted = 0
    for layer, neurons in steps:
        if previous is not None and previous[0] == layer:
            cache.release(layer)
            previous = None
        mask = torch.zeros(1, 96, dtype=torch.bool)
        mask[0, list(neurons)] = True
        cache.begin(layer, Selection.from_mask(mask), 1)
        cache.finish(layer)
        wanted += len(neurons)
        for of, names in (previous, (layer, neurons)) if previous else ((layer, neurons),):
            for neuron in names:
                slot = int(cache.places[of * 96 + neuron])
                assert slot >= 0
                start = int(offsets[of][neuron])
                record = raw[start : start + bundle.record_bytes]
                assert cache.arena[slot].numpy().tobytes() == record
        taken = cache.places[cache.places >= 0]
        assert len(taken.unique()) == len(taken) <= slots
        if previous is not None:
            cache.release(previous[0])
        previous = layer, neurons
    assert cache.counters().wanted == wanted


def test_too_few_slots_is_an_error_and_the_cache_goes_on(bundle):
    offsets = [bundle.offsets(layer) for layer in range(3)]
    cache = NeuronCache(bundle.reader(), offsets, record=bundle.record_bytes, slots=20)
    with pytest.raises(InputError, match="memory-limit"):
        cache.begin(0, None, 1)
    few = torch.zeros(1, 96, dtype=torch.bool)
    few[0, :20] = True
    cache.begin(0, Selection.from_mask(few), 1)
    cache.finish(0)
    assert (cache.places[:20] >= 0).all()


def test_what_is_used_often_stays(bundle):
    offsets = [bundle.offsets(layer) for layer in range(3)]
    cache = NeuronCache(bundle.reader(), offsets, record=bundle.record_bytes, slots=40)
    for step in range(30):
        mask = torch.zeros(1, 96, dtype=torch.bool)
        mask[0, :10] = True
        mask[0, 10 + step * 2 : 12 + step * 2] = True
        cache.begin(0, Selection.from_mask(mask), 1)
        cache.finish(0)
        cache.release(0)
    assert cache.counters() == (30 * 12, 10 + 60)
