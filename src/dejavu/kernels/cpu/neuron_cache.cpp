#include "neuron_cache.h"

#include <algorithm>
#include <cmath>

namespace dejavu {
namespace {

constexpr Size kBatchShare = 64;  // a search for victims finds this share of the slots at once
constexpr int64_t kRescale = 512; // half-lives after which values are brought back near 1
constexpr double kPinned = 1e300;

}  // namespace

NeuronCache::NeuronCache(FlashReader& reader, uint8_t* arena, Size slots, Size record, Size layers,
                         const int64_t* first, const int64_t* offsets, int32_t* places,
                         double half_life)
    : reader_(reader), arena_(arena), slots_(slots), record_(record), first_(first), offsets_(offsets), places_(places), half_life_(half_life),
      owner_((size_t)slots, -1), layer_of_((size_t)slots, -1), value_((size_t)slots, 0),
      stamp_((size_t)slots, 0), steps_((size_t)layers, 0), serial_((size_t)layers, 0),
      ticket_((size_t)layers, 0), open_((size_t)layers, 0), seen_((size_t)first[layers], 0) {
  std::fill(places, places + first[layers], -1);
}

NeuronCache::~NeuronCache() {
  for (const int64_t ticket : ticket_)
    if (ticket) reader_.wait(ticket);
}

bool NeuronCache::held(int32_t slot) const {
  const int32_t layer = layer_of_[(size_t)slot];
  return layer >= 0 && open_[(size_t)layer] && stamp_[(size_t)slot] == serial_[(size_t)layer];
}

// The slots of least value, in order; those in use stay out.
void NeuronCache::refill() {
  victims_.clear();
  for (int32_t slot = 0; slot < slots_; ++slot)
    if (!held(slot)) victims_.emplace_back(value_[(size_t)slot], slot);
  const Size count = std::min<Size>((Size)victims_.size(), slots_ / kBatchShare + 16);
  std::nth_element(victims_.begin(), victims_.begin() + count, victims_.end());
  victims_.resize((size_t)count);
  std::sort(victims_.rbegin(), victims_.rend());
}

int32_t NeuronCache::free_slot() {
  if (filled_ < slots_) return (int32_t)filled_++;
  for (bool again = true;; again = false) {
    while (!victims_.empty()) {
      const auto [value, slot] = victims_.back();
      victims_.pop_back();
      // One that was used since the search is not a victim any more.
      if (value_[(size_t)slot] == value && !held(slot)) return slot;
    }
    if (!again) return -1;
    refill();
  }
}

void NeuronCache::touch(int32_t slot, Size layer) {
  value_[(size_t)slot] += use_;
  stamp_[(size_t)slot] = serial_[(size_t)layer];
}

bool NeuronCache::begin(Size layer, const Selection* selection) {
  const size_t at = (size_t)layer;
  if (++steps_[at] > clock_) {
    clock_ = steps_[at];
    if (clock_ - epoch_ > (int64_t)(half_life_ * kRescale)) {
      const double factor = std::exp2(-(double)(clock_ - epoch_) / half_life_);
      for (double& value : value_)
        if (value < kPinned) value *= factor;
      for (double& value : seen_) value *= factor;
      victims_.clear();
      epoch_ = clock_;
    }
    use_ = std::exp2((double)(clock_ - epoch_) / half_life_);
  }
  serial_[at] = ++begins_;
  open_[at] = true;
  from_.clear();
  to_.clear();
  entered_.clear();
  int32_t* places = places_ + first_[at];
  const Size neurons = first_[at + 1] - first_[at];
  const auto want = [&](Size neuron) {
    ++counters_.wanted;
    const int32_t slot = places[neuron];
    if (slot >= 0) return touch(slot, layer);
    entered_.push_back((int32_t)neuron);
  };
  // First all that is there, so that nothing of it is given up for what is not.
  if (!selection)
    for (Size neuron = 0; neuron < neurons; ++neuron) want(neuron);
  else
    for (Size t = 0; t < selection->tiles(); ++t)
      for (Size k = 0; k < selection->counts[t]; ++k)
        want(selection->indices[t * selection->tile + k]);
  counters_.missed += (int64_t)entered_.size();
  for (size_t i = 0; i < entered_.size(); ++i) {
    const int32_t neuron = entered_[i], slot = free_slot();
    if (slot < 0) {
      entered_.resize(i);
      forget(layer);
      return false;
    }
    if (const int32_t old = owner_[(size_t)slot]; old >= 0) {
      places_[old] = -1;
      seen_[(size_t)old] = value_[(size_t)slot];
    }
    const int64_t number = first_[at] + neuron;
    owner_[(size_t)slot] = (int32_t)number;
    layer_of_[(size_t)slot] = (int32_t)layer;
    value_[(size_t)slot] = seen_[(size_t)number];
    touch(slot, layer);
    places[neuron] = slot;
    from_.push_back(offsets_[number]);
    to_.push_back((uint64_t)(arena_ + (Size)slot * record_));
  }
  lengths_.assign(from_.size(), record_);
  ticket_[at] = from_.empty() ? 0
                              : reader_.submit(from_.data(), lengths_.data(), to_.data(),
                                               from_.size());
  return true;
}

// A begin that did not bring its neurons: none of the layer's is taken for present afterwards.
void NeuronCache::forget(Size layer) {
  const size_t at = (size_t)layer;
  for (Size slot = 0; slot < filled_; ++slot)
    if (layer_of_[(size_t)slot] == layer && owner_[(size_t)slot] >= 0) {
      places_[owner_[(size_t)slot]] = -1;
      owner_[(size_t)slot] = layer_of_[(size_t)slot] = -1;
      value_[(size_t)slot] = 0;
    }
  victims_.clear();
  open_[at] = false;
  ticket_[at] = 0;
}

Outcome NeuronCache::finish(Size layer) {
  const int64_t ticket = ticket_[(size_t)layer];
  ticket_[(size_t)layer] = 0;
  if (!ticket) return {};
  const Outcome outcome = reader_.wait(ticket);
  if (outcome.fault != FlashFault::none) forget(layer);
  return outcome;
}

bool NeuronCache::act(NeuronStep step, Size layer, const Selection* selection) {
  switch (step) {
    case NeuronStep::begin:
      if (begin(layer, selection)) return true;
      failure_.crowded = layer;
      return false;
    case NeuronStep::finish:
      failure_.outcome = finish(layer);
      return failure_.outcome.fault == FlashFault::none;
    case NeuronStep::release:
      release(layer);
  }
  return true;
}

void run_neurons(const NeuronArgs& a, Worker& worker) {
  if (*a.layer < 0) return;
  worker.share(1, [&](Size) {
    if (!a.cache->act(a.step, (Size)*a.layer, a.selection)) worker.fail(Fault::neurons);
  });
}

Scratch scratch_neurons(const NeuronArgs&) { return {}; }

void NeuronCache::pin(const int64_t* neurons, Size count) {
  for (Size i = 0; i < count; ++i) seen_[(size_t)neurons[i]] = kPinned;
}

}  // namespace dejavu
