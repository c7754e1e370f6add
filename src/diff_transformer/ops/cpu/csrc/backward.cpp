// Backward pass (Appendix G, Equation 7): for a block of queries both maps and dP = dO·Vᵀ are computed once and stored
// until the sums over their rows are known; dV takes the difference of the maps, so that it too is one product. The
// signal heads of a group come one after the other, and what they send to their noise map is added up before its own
// products: −Σ λ dP takes the place of dP there.
#include <algorithm>
#include <atomic>
#include <memory>
#include <mutex>
#include <thread>
#include <tuple>
#include <utility>
#include <vector>

#include "block.h"
#include "kernels.h"
#include "parallel.h"
#include "transposed.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

// A share of a unit's blocks in the order in which they are begun, and the chunks of keys that each visits. Of each
// chunk, the places of its first and its last visitor in that order; −1 where it has none.
struct Order {
  std::vector<int64_t> blocks;
  std::vector<Range> seen;
  std::vector<int64_t> first, last;

  explicit Order(int64_t chunks) : first(chunks, -1), last(chunks, -1) {}

  int64_t size() const { return static_cast<int64_t>(blocks.size()); }

  void add(int64_t block, Range chunks) {
    for (int64_t at = chunks.low; at < chunks.high; ++at) {
      if (first[at] < 0) first[at] = size();
      last[at] = size();
    }
    blocks.push_back(block);
    seen.push_back(chunks);
  }

  // Who visits the chunk after that place; −1 if nobody does.
  int64_t after(int64_t place, int64_t at) const {
    if (place == last[at]) return -1;
    do ++place;
    while (at < seen[place].low || at >= seen[place].high);
    return place;
  }
};

// The sums that become the gradients of a unit's keys and values, in strips of channels: [strip][S][kStrip]. A chunk of
// keys takes the blocks of a share one after the other, always in the same order: so threads can share the sums, and
// these do not depend on who was first. A block that waits for an earlier one waits for a thread that is at work, for
// blocks are begun in order.
class KeySums {
 public:
  KeySums(const Problem& p, const Order& order, int64_t chunk, const std::atomic<bool>& failed)
      : p_(p), order_(order), chunk_(chunk), failed_(failed), sums_(size(p)), turns_(order.first.size()) {
    for (size_t at = 0; at < turns_.size(); ++at) turns_[at] = order.first[at];
  }

  // Waits until all earlier blocks have added what they send to the chunk.
  void enter(int64_t place, int64_t at) {
    for (int64_t spins = 0; turns_[at].load(std::memory_order_acquire) != place; ++spins) {
      if (failed_.load(std::memory_order_relaxed)) return;  // the call raises an error, whatever the sums are
      if (spins > 100) std::this_thread::yield();
    }
    if (order_.first[at] == place) clear(at);
  }

  void leave(int64_t place, int64_t at) { turns_[at].store(order_.after(place, at), std::memory_order_release); }

  // When all blocks are done.
  void clear_unvisited() {
    for (size_t at = 0; at < turns_.size(); ++at)
      if (order_.first[at] < 0) clear(static_cast<int64_t>(at));
  }

  float* keys(int64_t map) const { return sums_.get() + map * divide_up(p_.d, kStrip) * p_.s * kStrip; }
  float* values() const { return keys(p_.key_maps); }

  static int64_t size(const Problem& p) { return strips(p) * p.s * kStrip; }

  void add(const KeySums& other) {
    for (int64_t i = 0; i < size(p_); ++i) sums_.get()[i] += other.sums_.get()[i];
  }

 private:
  static int64_t strips(const Problem& p) { return p.key_maps * divide_up(p.d, kStrip) + divide_up(p.dv, kStrip); }

  void clear(int64_t at) {
    const int64_t low = at * chunk_, high = std::min(low + chunk_, p_.s);
    for (int64_t strip = 0; strip < strips(p_); ++strip)
      std::fill_n(sums_.get() + (strip * p_.s + low) * kStrip, (high - low) * kStrip, 0.0f);
  }

  const Problem& p_;
  const Order& order_;
  const int64_t chunk_;
  const std::atomic<bool>& failed_;
  Buffer<float> sums_;
  std::vector<std::atomic<int64_t>> turns_;
};

// Hands out blocks: a thread stays with its share while that has blocks, then begins another one, and helps in the end
// where most are left.
class BlockQueue {
 public:
  struct Task {
    int64_t share = -1, place = 0;
    KeySums* sums = nullptr;
  };

  // Each unit has as many shares as there are orders.
  BlockQueue(const Problem& p, const std::vector<Order>& orders, int64_t chunk)
      : p_(p), orders_(orders), chunk_(chunk), shares_(p.units() * orders.size()) {}

  const Order& order(int64_t share) const { return orders_[share % orders_.size()]; }

  // The next task of who has done the last one; its share is −1 where nothing is left.
  Task next(const Task& last) {
    const std::lock_guard<std::mutex> guard(mutex_);
    if (failed_) return {};
    int64_t share = last.share;
    if (share < 0 || left(share) == 0) {
      if (share >= 0) --shares_[share].threads;
      share = begun_ < static_cast<int64_t>(shares_.size()) ? begun_++ : longest();
      if (share < 0) return {};
      ++shares_[share].threads;
    }
    Share& chosen = shares_[share];
    if (!chosen.sums) chosen.sums = std::make_unique<KeySums>(p_, order(share), chunk_, failed_);
    return {share, chosen.taken++, chosen.sums.get()};
  }

  // Whether that was the last block of its unit.
  bool finish(const Task& task) {
    const int64_t shares = static_cast<int64_t>(orders_.size()), first = task.share / shares * shares;
    const std::lock_guard<std::mutex> guard(mutex_);
    ++shares_[task.share].finished;
    for (int64_t share = first; share < first + shares; ++share)
      if (shares_[share].finished < order(share).size()) return false;
    return true;
  }

  // The sums of all shares of a finished unit, always added in the same order.
  std::unique_ptr<KeySums> total(int64_t unit) {
    const int64_t shares = static_cast<int64_t>(orders_.size());
    std::unique_ptr<KeySums> all;
    for (int64_t share = unit * shares; share < (unit + 1) * shares; ++share) {
      std::unique_ptr<KeySums> own = std::move(shares_[share].sums);
      own->clear_unvisited();
      if (all) all->add(*own);
      else all = std::move(own);
    }
    return all;
  }

  // Nobody shall wait for a thread that has thrown.
  void fail() { failed_ = true; }

 private:
  struct Share {
    int64_t taken = 0, finished = 0, threads = 0;
    std::unique_ptr<KeySums> sums;
  };

  int64_t left(int64_t share) const { return order(share).size() - shares_[share].taken; }

  // The share with the most blocks left for each thread; −1 where there are none.
  int64_t longest() const {
    int64_t best = -1;
    for (int64_t share = 0; share < static_cast<int64_t>(shares_.size()); ++share) {
      if (left(share) == 0) continue;
      if (best < 0 || left(share) * (shares_[best].threads + 1) > left(best) * (shares_[share].threads + 1))
        best = share;
    }
    return best;
  }

  const Problem& p_;
  const std::vector<Order>& orders_;
  const int64_t chunk_;
  std::vector<Share> shares_;
  int64_t begun_ = 0;
  std::mutex mutex_;
  std::atomic<bool> failed_{false};
};

// Rows of `width` numbers as the right side of a product that sums over rows: [strip][rows / kDepth][kStrip], up to the
// last vector of channels that is used. Zeros stand for what it takes to fill that, and for the rows of spare lanes.
template <class Kind, class Row>
void pack_channels(const Rows& rows, int64_t width, const Row& row, float* to) {
  using T = typename Kind::Scalar;
  constexpr int depth = Kind::kDepth;
  static const T zeros[kStrip] = {};
  for (int64_t strip = 0; strip * kStrip < width; ++strip) {
    const int64_t used = std::min<int64_t>(kStrip, width - strip * kStrip);
    for (int64_t r = 0; r < rows.vecs * kLanes; r += depth) {
      T* __restrict out = reinterpret_cast<T*>(to) + (strip * kStrip + r) * kStrip;
      const T* x[depth];
      for (int i = 0; i < depth; ++i) x[i] = r + i < rows.count ? row(r + i) + strip * kStrip : zeros;
      for (int64_t c = 0; c < used; ++c)
        for (int i = 0; i < depth; ++i) out[c * depth + i] = x[i][c];
      std::fill(out + used * depth, out + round_up(used, kLanes) * depth, T(0.0f));
    }
  }
}

template <class Kind>
struct Backward {
  using T = typename Kind::Scalar;
  const Problem& p;
  const Blocks blocks;
  const Heads<T> keys, values;
  const Transposed<Kind>& key_channels;
  const MapStorage storage;
  const Gradients& gradients;

  struct Scratch {
    Buffer<float> queries, query_rows, grad_lanes, grad_rows, mask, maps[2], grad_weights, noise_grads, sums, lanes;
    Buffer<T> weights;
    std::vector<bool> skipped;
    Scratch(const Problem& p, const MapStorage& storage)
        : queries(2 * p.d * kStrip),
          query_rows(2 * divide_up(p.d, kStrip) * kStrip * kStrip),
          grad_lanes(p.dv * kStrip),
          grad_rows(divide_up(p.dv, kStrip) * kStrip * kStrip),
          mask(Kind::kChunk * kStrip),
          maps{Buffer<float>(storage.size), Buffer<float>(storage.size)},
          grad_weights(storage.size),
          noise_grads(p.ratio > 1 ? storage.size : 0),
          sums(2 * p.d * kStrip),
          lanes(Kind::kChunk * kStrip),
          weights(Kind::kChunk * kStrip) {}
  };

  // What is known of a block's rows: of the signal head at hand, and of the noise map of all.
  struct RowNumbers {
    alignas(64) float lambdas[kStrip], signals[kStrip], highest[2][kStrip], inverse[2][kStrip], means[2][kStrip],
        noise_means[kStrip];
    alignas(64) float log_sums[2][kStrip];  // gradients of them, times the scale of the scores
  };

  void read_queries(int64_t batch, const Rows& rows, int c, int64_t map, RowNumbers& numbers, Scratch& scratch) const {
    auto row = [&](int64_t r) { return query_row<T>(p, batch, rows, map, r); };
    pack_lanes<Kind>(rows, p.d, row, scratch.queries.get() + c * p.d * kStrip);
    pack_channels<Kind>(rows, p.d, row, scratch.query_rows.get() + c * divide_up(p.d, kStrip) * kStrip * kStrip);
    for (int r = 0; r < kStrip; ++r) {
      const float* from = gradients.statistics + map_index(p, batch, rows, map, r, 2);
      numbers.highest[c][r] = from[0];
      numbers.inverse[c][r] = from[p.n];
      const bool counts = gradients.log_sums && r < rows.count;
      numbers.log_sums[c][r] = counts ? gradients.log_sums[map_index(p, batch, rows, map, r, 1)] * p.scale : 0.0f;
    }
  }

  void write_queries(int64_t batch, const Rows& rows, int c, int64_t map, const Scratch& scratch) const {
    T* to = static_cast<T*>(gradients.q);
    unpack_lanes<Kind>(rows, p.d, scratch.sums.get() + c * p.d * kStrip,
                       [&](int r) { return to + map_index(p, batch, rows, map, r, 1) * p.d; });
  }

  // Says whether the gradients of the block's queries are finite: what is not in those of the keys is not in these.
  bool block(int64_t unit, int64_t index, Scratch& scratch, int64_t place, KeySums& key_sums) const {
    const int64_t batch = unit / p.key_heads, key_head = unit % p.key_heads;
    const Rows rows = blocks.rows(key_head, index);
    RowNumbers numbers;
    std::fill_n(numbers.noise_means, kStrip, 0.0f);
    read_queries(batch, rows, 1, p.ratio, numbers, scratch);
    float* noise_sums = scratch.sums.get() + p.d * kStrip;
    std::fill_n(noise_sums, p.d * kStrip, 0.0f);
    bool finite = true;
    for (int64_t signal = 0; signal < p.ratio; ++signal)
      if (!signal_head(unit, batch, rows, signal, numbers, scratch, place, key_sums)) finite = false;
    write_queries(batch, rows, 1, p.ratio, scratch);
    return finite && are_finite(noise_sums, p.d * kStrip);
  }

  // The same for one signal head of each group. The last one finishes the noise map, whose sums go on in `scratch`.
  bool signal_head(int64_t unit, int64_t batch, const Rows& rows, int64_t signal, RowNumbers& numbers,
                   Scratch& scratch, int64_t place, KeySums& key_sums) const {
    const int vecs = rows.vecs;
    const bool is_first = signal == 0, is_last = signal == p.ratio - 1;
    const bool adds_up = p.ratio > 1 && storage.all;  // of maps that are not stored, each head does its own part
    auto grad_row = [&](int64_t r) {
      return static_cast<const T*>(gradients.out) + batch * gradients.out_batch +
             head_of(p, rows, signal, r) * gradients.out_head + rows.query[r] * gradients.out_row;
    };
    // A spare lane repeats the last query, so that its numbers are in range; without a gradient it adds nothing.
    pack_lanes<Kind>(rows, p.dv, grad_row, scratch.grad_lanes.get());
    for (int r = rows.count; r < rows.vecs * kLanes; ++r)
      for (int64_t c = 0; c < p.dv / Kind::kDepth; ++c) scratch.grad_lanes.get()[c * kStrip + r] = 0.0f;
    pack_channels<Kind>(rows, p.dv, grad_row, scratch.grad_rows.get());
    const int64_t query_strips = divide_up(p.d, kStrip);
    read_queries(batch, rows, 0, signal, numbers, scratch);
    float *lambdas = numbers.lambdas, *noise_means = numbers.noise_means;
    float(*highest)[kStrip] = numbers.highest, (*inverse)[kStrip] = numbers.inverse, (*means)[kStrip] = numbers.means;
    for (int r = 0; r < kStrip; ++r) {
      lambdas[r] = lambda_of(p, batch, rows, signal, r);
      numbers.signals[r] = signal_of(p, batch, rows, signal, r);
      means[0][r] = means[1][r] = 0.0f;
    }

    // Both maps and dP of a chunk; adds the sums over keys of P_c · dP to `sums`.
    auto compute = [&](Range chunk, bool edge, Visible mask, float(*sums)[kStrip]) {
      const int64_t offset = storage.offset(rows, chunk);
      float* grads = scratch.grad_weights.get() + offset;
      multiply_rows<Kind>(rows, chunk, edge, left_rows<Kind>(values.row(p, unit, 0, chunk.low), values.row_stride),
                          scratch.grad_lanes.get(), p.dv, grads);
      for (int c = 0; c < 2; ++c) {
        float* map = scratch.maps[c].get() + offset;
        const bool is_stored = c == 1 && !is_first && storage.all;
        Vec scale(0.0f);
        if (!is_stored) {
          const Left keys_of_chunk = left_rows<Kind>(keys.row(p, unit, c, chunk.low), keys.row_stride);
          scale = score_chunk<Kind>(p, rows, chunk, edge, keys_of_chunk, scratch.queries.get() + c * p.d * kStrip,
                                    mask == Visible::kSome ? scratch.mask.get() : nullptr, map);
        }
        for (int v = 0; v < vecs; ++v) {
          const int lane = v * kLanes;
          const Vec top = load(highest[c] + lane), factor = load(inverse[c] + lane);
          Vec sum(0.0f);
          if (is_stored) {
            for (int64_t j = 0; j < chunk.size(); ++j)
              sum = at::vec::fmadd(load(map + j * kStrip + lane), load(grads + j * kStrip + lane), sum);
          } else {
            for (int64_t j = 0; j < chunk.size(); ++j) {
              float* x = map + j * kStrip + lane;
              // The maximum was of products that another number of threads may round otherwise.
              const Vec weight = exp_of_negative(at::vec::clamp_max(load(x) * scale - top, Vec(0.0f))) * factor;
              weight.store(x);
              sum = at::vec::fmadd(weight, load(grads + j * kStrip + lane), sum);
            }
          }
          (load(sums[c] + lane) + sum).store(sums[c] + lane);
        }
      }
    };
    scratch.skipped.clear();
    for_each_chunk<Kind>(rows, [&](Range chunk, bool edge, int64_t) {
      const Visible mask = mask_tile(p, batch, rows, chunk, scratch.mask.get());
      scratch.skipped.push_back(mask == Visible::kNone);
      if (mask != Visible::kNone) compute(chunk, edge, mask, means);
    });

    for (int r = 0; r < kStrip; ++r) noise_means[r] += lambdas[r] * means[1][r];
    float* query_sums = scratch.sums.get();
    std::fill_n(query_sums, p.d * kStrip, 0.0f);
    for_each_chunk<Kind>(rows, [&](Range chunk, bool edge, int64_t number) {
      const int64_t turn = chunk.low / Kind::kChunk;
      if (scratch.skipped[number]) {
        if (is_first) key_sums.enter(place, turn);
        if (is_last) key_sums.leave(place, turn);
        return;
      }
      if (!storage.all) {
        alignas(64) float known[2][kStrip] = {};
        compute(chunk, edge, mask_tile(p, batch, rows, chunk, scratch.mask.get()), known);
      }
      const int64_t offset = storage.offset(rows, chunk);
      const float* maps[2] = {scratch.maps[0].get() + offset, scratch.maps[1].get() + offset};
      const float* grads = scratch.grad_weights.get() + offset;
      float* noise_grads = scratch.noise_grads.get() + (adds_up ? offset : 0);
      T* weights = scratch.weights.get();
      for (int64_t j = 0; j < chunk.size(); ++j)
        for (int v = 0; v < vecs; ++v) {
          const int64_t at = j * kStrip + v * kLanes;
          const Vec lambda = load(lambdas + v * kLanes);
          const Vec first = p.signal ? load(maps[0] + at) * load(numbers.signals + v * kLanes) : load(maps[0] + at);
          Kind::store_row(weights + at, first - lambda * load(maps[1] + at));
          if (!adds_up) continue;
          const Vec part = lambda * load(grads + at);
          (is_first ? part : load(noise_grads + at) + part).store(noise_grads + at);
        }
      if (is_first) key_sums.enter(place, turn);
      add_to_keys(rows, chunk, edge, scratch.grad_rows.get(), p.dv, weights, key_sums.values());
      for (int c = 0; c < (adds_up && !is_last ? 1 : 2); ++c) {
        const bool of_all = c == 1 && adds_up;
        const float* grads_of_map = of_all ? noise_grads : grads;
        float* lanes = Kind::kDepth == 1 ? reinterpret_cast<float*>(weights) : scratch.lanes.get();
        for (int v = 0; v < vecs; ++v) {
          const int lane = v * kLanes;
          const Vec mean = load((of_all ? noise_means : means[c]) + lane);
          const Vec factor = c == 0    ? load(numbers.signals + lane) * Vec(p.scale)
                             : of_all ? Vec(-p.scale)
                                      : load(lambdas + lane) * Vec(-p.scale);
          // That of the noise map's log-sum counts once for all of its signal heads.
          const bool has_log_sums = gradients.log_sums && (c == 0 || adds_up || is_first);
          const Vec of_log_sum = load(numbers.log_sums[c] + lane);
          char* to = reinterpret_cast<char*>(lanes + lane);
          for (int64_t j = 0; j < chunk.size(); j += Kind::kDepth, to += kStrip * sizeof(float)) {
            Vec grad_scores[Kind::kDepth];
            for (int i = 0; i < Kind::kDepth; ++i) {
              if (j + i >= chunk.size()) {
                grad_scores[i] = Vec(0.0f);
                continue;
              }
              const int64_t at = (j + i) * kStrip + lane;
              grad_scores[i] = load(maps[c] + at) * factor * (load(grads_of_map + at) - mean);
              if (has_log_sums) grad_scores[i] = at::vec::fmadd(load(maps[c] + at), of_log_sum, grad_scores[i]);
              if (Kind::kDepth > 1) Kind::store_row(weights + at, grad_scores[i]);
            }
            Kind::store(to, grad_scores);
          }
          for (int64_t j = round_up(chunk.size(), Kind::kDepth); j % Kind::kTile; j += Kind::kDepth) {
            Vec(0.0f).store(to);
            to += kStrip * sizeof(float);
          }
        }
        add_to_keys(rows, chunk, edge, scratch.query_rows.get() + c * query_strips * kStrip * kStrip, p.d, weights,
                    key_sums.keys(c % p.key_maps));
        if (is_last && c == 1) key_sums.leave(place, turn);
        multiply_channels<Kind>(rows, chunk, edge, key_channels.from(unit, c, chunk.low), lanes, p.d,
                                query_sums + c * p.d * kStrip);
      }
    });
    write_queries(batch, rows, 0, signal, scratch);
    for (int r = 0; r < rows.count; ++r) {
      const int64_t row = (batch * p.heads + head_of(p, rows, signal, r)) * p.n + rows.query[r];
      gradients.lam[row] = -means[1][r];
      if (p.signal) gradients.signal[row] = means[0][r];
    }
    return are_finite(query_sums, p.d * kStrip);
  }

  // Gradients of keys or values: sums over the block's queries of weights[key][query] · row[query][channel].
  void add_to_keys(const Rows& rows, Range chunk, bool edge, const float* right, int64_t width, const T* weights,
                   float* sums) const {
    for_each_part<Kind>(rows, chunk, edge, [&](Range part, Lanes active) {
      const int64_t first = active.first * kLanes, depth = (active.last - active.first) * kLanes / Kind::kDepth;
      const Left left = left_rows<Kind>(weights + (part.low - chunk.low) * kStrip + first, kStrip);
      for (int64_t strip = 0; strip * kStrip < width; ++strip) {
        const int64_t used = std::min<int64_t>(kStrip, width - strip * kStrip);
        product<Kind, true>(left, right + strip * kStrip * kStrip / Kind::kDepth + first / Kind::kDepth * kStrip,
                            sums + (strip * p.s + part.low) * kStrip, part.size(),
                            {0, static_cast<int>(divide_up(used, kLanes))}, depth);
      }
    });
  }

  void write_keys(int64_t unit, const KeySums& key_sums) const {
    for (int64_t map = 0; map < p.key_maps; ++map)
      write_strips(key_sums.keys(map), p.d, static_cast<T*>(gradients.k) + (unit * p.key_maps + map) * p.s * p.d);
    write_strips(key_sums.values(), p.dv, static_cast<T*>(gradients.v) + unit * p.s * p.dv);
  }

  void write_strips(const float* sums, int64_t width, T* to) const {
    for (int64_t strip = 0; strip * kStrip < width; ++strip) {
      const int64_t used = std::min<int64_t>(kStrip, width - strip * kStrip);
      for (int64_t j = 0; j < p.s; ++j) {
        const float* from = sums + (strip * p.s + j) * kStrip;
        for (int64_t c = 0; c < used; ++c) to[j * width + strip * kStrip + c] = static_cast<T>(from[c]);
      }
    }
  }
};

// All sums of a call together take at most so many bytes, unless those of one unit for each thread take more.
constexpr int64_t kMostSums = int64_t{1} << 28;

// In how many shares to cut a unit's blocks, each with sums of its own: the fewest that keep the threads busy. Where
// their sums would take too much memory there are fewer, whose blocks take turns: the sums of a chunk then go from one
// processor's cache to the next, and the signal heads of a group, which come one after the other, wait for each other.
int64_t shares_of_unit(const Problem& p, int64_t blocks, int64_t threads) {
  const int64_t bytes = std::max<int64_t>(KeySums::size(p), 1) * sizeof(float) * std::min(p.units(), threads);
  const int64_t most = std::min({blocks, threads, kMostSums / bytes});
  for (int64_t shares = 1; shares < most; ++shares) {
    const int64_t tasks = p.units() * shares;
    if (tasks * 10 >= divide_up(tasks, threads) * threads * 8) return shares;
  }
  return std::max<int64_t>(most, 1);
}

// Which share takes each block of a unit: the block with the most keys first, each goes to the share with the least work.
// None is empty: a block that sees no keys is work, too.
std::vector<Order> orders_of_shares(const Blocks& blocks, int64_t shares, int64_t chunk) {
  struct Visit {
    Range keys;
    int64_t block;
  };
  std::vector<Visit> visits;
  for (int64_t block = 0; block < blocks.count; ++block) visits.push_back({blocks.rows(0, block).by_any, block});
  // Those that see the same keys, in the heads of a group, next to each other.
  auto key = [](const Visit& visit) { return std::make_tuple(-visit.keys.size(), visit.keys.low, visit.block); };
  std::sort(visits.begin(), visits.end(), [&](const Visit& a, const Visit& b) { return key(a) < key(b); });
  std::vector<Order> orders(shares, Order(divide_up(blocks.problem.s, chunk)));
  std::vector<int64_t> work(shares, 0);
  for (const auto& [keys, block] : visits) {
    const int64_t share = std::min_element(work.begin(), work.end()) - work.begin();
    work[share] += std::max<int64_t>(keys.size(), 1);
    orders[share].add(block, keys.size() > 0 ? Range{keys.low / chunk, divide_up(keys.high, chunk)} : Range{0, 0});
  }
  return orders;
}

template <class Kind>
bool differentiate_kind(const Problem& p, const Gradients& gradients) {
  using T = typename Kind::Scalar;
  const int64_t threads = thread_count();
  const Transposed<Kind> key_channels(p, keys_of<T>(p));
  const Blocks blocks(p, block_rows(p, threads));
  const Backward<Kind> backward{p,
                                blocks,
                                keys_of<T>(p),
                                values_of<T>(p),
                                key_channels,
                                MapStorage(blocks, Kind::kChunk),
                                gradients};
  const std::vector<Order> orders =
      orders_of_shares(blocks, shares_of_unit(p, blocks.count, threads), Kind::kChunk);
  const int64_t shares = static_cast<int64_t>(orders.size());
  BlockQueue queue(p, orders, Kind::kChunk);
  std::atomic<bool> finite{true};
  in_threads(p.units() * blocks.count, [&] {
    try {
      const Products<Kind> products;
      typename Backward<Kind>::Scratch scratch(p, backward.storage);
      for (auto task = queue.next({}); task.share >= 0; task = queue.next(task)) {
        const int64_t unit = task.share / shares, block = queue.order(task.share).blocks[task.place];
        if (!backward.block(unit, block, scratch, task.place, *task.sums)) finite = false;
        if (queue.finish(task)) backward.write_keys(unit, *queue.total(unit));
      }
    } catch (...) {
      queue.fail();
      throw;
    }
  });
  return finite;
}

}  // namespace

bool differentiate(const Problem& p, const Gradients& gradients) {
#ifdef DIFF_TRANSFORMER_BFLOAT16_PAIRS
  if (gradients.dtype == ScalarType::BFloat16 && BFloat16Tiles::are_supported())
    return differentiate_kind<BFloat16Tiles>(p, gradients);
  if (gradients.dtype == ScalarType::BFloat16)
    return differentiate_kind<BFloat16Pair>(p, gradients);
#endif
  return differentiate_kind<Float32>(p, gradients);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
