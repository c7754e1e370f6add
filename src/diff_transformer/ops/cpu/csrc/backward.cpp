// Backward pass (Appendix G, Equation 7): for a block of queries both maps and dP = dO·Vᵀ are computed once and stored
// until the sums over their rows are known; dV takes the difference of the maps, so that it too is one product. The
// signal heads of a group come one after the other, and what they send to their noise map is added up before its own
// products: −Σ λ dP takes the place of dP there.
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "block.h"
#include "kernels.h"
#include "parallel.h"
#include "transposed.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

// Gradients of one unit's keys and values, in strips of channels: [strip][S][kStrip].
struct KeyGradients {
  Buffer<float> keys, values;
  int64_t key_size, value_size;

  explicit KeyGradients(const Problem& p)
      : keys(p.key_maps * divide_up(p.d, kStrip) * p.s * kStrip),
        values(divide_up(p.dv, kStrip) * p.s * kStrip),
        key_size(p.key_maps * divide_up(p.d, kStrip) * p.s * kStrip),
        value_size(divide_up(p.dv, kStrip) * p.s * kStrip) {
    std::fill_n(keys.get(), key_size, 0.0f);
    std::fill_n(values.get(), value_size, 0.0f);
  }

  void add(const KeyGradients& other) {
    for (int64_t i = 0; i < key_size; ++i) keys.get()[i] += other.keys.get()[i];
    for (int64_t i = 0; i < value_size; ++i) values.get()[i] += other.values.get()[i];
  }
};

// Rows of `width` numbers as the right side of a product that sums over rows: [strip][rows / kDepth][kStrip].
template <class Kind, class Row>
void pack_channels(const Rows& rows, int64_t width, const Row& row, float* to) {
  using T = typename Kind::Scalar;
  const int64_t count = rows.vecs * kLanes;
  T* all = reinterpret_cast<T*>(to);
  constexpr int depth = Kind::kDepth;
  for (int64_t strip = 0; strip * kStrip < width; ++strip) {
    const int64_t used = std::min<int64_t>(kStrip, width - strip * kStrip);
    for (int64_t r = 0; r < count; ++r) {
      T* out = all + ((strip * kStrip + r / depth * depth) * kStrip) + r % depth;
      const T* x = r < rows.count ? row(r) + strip * kStrip : nullptr;
      for (int64_t c = 0; c < kStrip; ++c) out[c * depth] = x && c < used ? x[c] : T(0.0f);
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
  const at::Tensor& grad_out;
  const float* statistics;
  T *grad_q, *grad_k, *grad_v;
  float* grad_lam;

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
    alignas(64) float lambdas[kStrip], highest[2][kStrip], inverse[2][kStrip], means[2][kStrip], noise_means[kStrip];
  };

  void read_queries(int64_t batch, const Rows& rows, int c, int64_t map, RowNumbers& numbers, Scratch& scratch) const {
    auto row = [&](int64_t r) { return query_row<T>(p, batch, rows, map, r); };
    pack_lanes<Kind>(rows, p.d, row, scratch.queries.get() + c * p.d * kStrip);
    pack_channels<Kind>(rows, p.d, row, scratch.query_rows.get() + c * divide_up(p.d, kStrip) * kStrip * kStrip);
    for (int r = 0; r < kStrip; ++r) {
      const float* from = statistics + map_index(p, batch, rows, map, r, 2);
      numbers.highest[c][r] = from[0];
      numbers.inverse[c][r] = from[p.n];
    }
  }

  void write_queries(int64_t batch, const Rows& rows, int c, int64_t map, const Scratch& scratch) const {
    unpack_lanes<Kind>(rows, p.d, scratch.sums.get() + c * p.d * kStrip,
                       [&](int r) { return grad_q + map_index(p, batch, rows, map, r, 1) * p.d; });
  }

  // Says whether the gradients of the block's queries are finite: what is not in those of the keys is not in these.
  bool block(int64_t unit, int64_t index, Scratch& scratch, KeyGradients& gradients) const {
    const int64_t batch = unit / p.key_heads, key_head = unit % p.key_heads;
    const Rows rows = blocks.rows(key_head, index);
    RowNumbers numbers;
    std::fill_n(numbers.noise_means, kStrip, 0.0f);
    read_queries(batch, rows, 1, p.ratio, numbers, scratch);
    float* noise_sums = scratch.sums.get() + p.d * kStrip;
    std::fill_n(noise_sums, p.d * kStrip, 0.0f);
    bool finite = true;
    for (int64_t signal = 0; signal < p.ratio; ++signal)
      if (!signal_head(unit, batch, rows, signal, numbers, scratch, gradients)) finite = false;
    write_queries(batch, rows, 1, p.ratio, scratch);
    return finite && are_finite(noise_sums, p.d * kStrip);
  }

  // The same for one signal head of each group. The last one finishes the noise map, whose sums go on in `scratch`.
  bool signal_head(int64_t unit, int64_t batch, const Rows& rows, int64_t signal, RowNumbers& numbers,
                   Scratch& scratch, KeyGradients& gradients) const {
    const int vecs = rows.vecs;
    const bool is_first = signal == 0, is_last = signal == p.ratio - 1;
    const bool adds_up = p.ratio > 1 && storage.all;  // of maps that are not stored, each head does its own part
    auto grad_row = [&](int64_t r) {
      return static_cast<const T*>(grad_out.data_ptr()) + batch * grad_out.stride(0) +
             head_of(p, rows, signal, r) * grad_out.stride(1) + rows.query[r] * grad_out.stride(2);
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
              const Vec weight = exp_of_negative(load(x) * scale - top) * factor;
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
      if (scratch.skipped[number]) return;
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
          Kind::store_row(weights + at, load(maps[0] + at) - lambda * load(maps[1] + at));
          if (!adds_up) continue;
          const Vec part = lambda * load(grads + at);
          (is_first ? part : load(noise_grads + at) + part).store(noise_grads + at);
        }
      add_to_keys(rows, chunk, edge, scratch.grad_rows.get(), p.dv, weights, gradients.values.get());
      for (int c = 0; c < (adds_up && !is_last ? 1 : 2); ++c) {
        const bool of_all = c == 1 && adds_up;
        const float* grads_of_map = of_all ? noise_grads : grads;
        float* lanes = Kind::kDepth == 1 ? reinterpret_cast<float*>(weights) : scratch.lanes.get();
        for (int v = 0; v < vecs; ++v) {
          const int lane = v * kLanes;
          const Vec mean = load((of_all ? noise_means : means[c]) + lane);
          const Vec factor = c == 0 ? Vec(p.scale) : of_all ? Vec(-p.scale) : load(lambdas + lane) * Vec(-p.scale);
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
                    gradients.keys.get() + (c % p.key_maps) * query_strips * p.s * kStrip);
        multiply_channels<Kind>(rows, chunk, edge, key_channels.from(unit, c, chunk.low), lanes, p.d,
                                query_sums + c * p.d * kStrip);
      }
    });
    write_queries(batch, rows, 0, signal, scratch);
    for (int r = 0; r < rows.count; ++r)
      grad_lam[(batch * p.heads + head_of(p, rows, signal, r)) * p.n + rows.query[r]] = -means[1][r];
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

  void write_keys(int64_t unit, const KeyGradients& gradients) const {
    for (int64_t map = 0; map < p.key_maps; ++map)
      write_strips(gradients.keys.get() + map * divide_up(p.d, kStrip) * p.s * kStrip, p.d,
                   grad_k + (unit * p.key_maps + map) * p.s * p.d);
    write_strips(gradients.values.get(), p.dv, grad_v + unit * p.s * p.dv);
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

// In how many parts to cut a unit's blocks, each with sums of its own: the fewest that keep the threads busy.
int64_t parts_of_unit(const Problem& p, int64_t blocks, int64_t threads) {
  const int64_t most = std::min(blocks, threads);
  for (int64_t parts = 1; parts < most; ++parts) {
    const int64_t tasks = p.units() * parts;
    if (tasks * 10 >= divide_up(tasks, threads) * threads * 8) return parts;
  }
  return std::max<int64_t>(most, 1);
}

// Which part takes each block of a unit: the block with the most keys first, each goes to the part with the least work.
std::vector<int64_t> parts_of_blocks(const Blocks& blocks, int64_t parts) {
  std::vector<int64_t> part_of(blocks.count, 0);
  if (parts == 1) return part_of;
  std::vector<std::pair<int64_t, int64_t>> by_work;
  for (int64_t block = 0; block < blocks.count; ++block)
    by_work.emplace_back(-blocks.rows(0, block).by_any.size(), block);
  std::sort(by_work.begin(), by_work.end());
  std::vector<int64_t> work(parts, 0);
  for (const auto& [less, block] : by_work) {
    part_of[block] = std::min_element(work.begin(), work.end()) - work.begin();
    work[part_of[block]] -= less;
  }
  return part_of;
}

template <class Kind>
bool differentiate_kind(const Problem& p, const at::Tensor& grad_out, const at::Tensor& statistics,
                        const at::Tensor& grad_q, const at::Tensor& grad_k, const at::Tensor& grad_v,
                        const at::Tensor& grad_lam) {
  using T = typename Kind::Scalar;
  const int64_t threads = at::get_num_threads();
  const Transposed<Kind> key_channels(p, keys_of<T>(p));
  const Blocks blocks(p, block_rows(p, threads));
  const Backward<Kind> backward{p,
                                blocks,
                                keys_of<T>(p),
                                values_of<T>(p),
                                key_channels,
                                MapStorage(blocks, Kind::kChunk),
                                grad_out,
                                statistics.data_ptr<float>(),
                                static_cast<T*>(grad_q.data_ptr()),
                                static_cast<T*>(grad_k.data_ptr()),
                                static_cast<T*>(grad_v.data_ptr()),
                                grad_lam.data_ptr<float>()};
  const int64_t count = backward.blocks.count, parts = parts_of_unit(p, count, threads);
  const std::vector<int64_t> part_of = parts_of_blocks(backward.blocks, parts);
  std::vector<std::vector<std::unique_ptr<KeyGradients>>> sums(p.units());
  for (auto& of_unit : sums) of_unit.resize(parts);
  std::vector<int64_t> finished(p.units(), 0);
  std::mutex mutex;
  std::atomic<bool> finite{true};
  share_tasks(p.units() * parts, [&](const auto& next) {
    const Products<Kind> products;
    typename Backward<Kind>::Scratch scratch(p, backward.storage);
    for (int64_t task = next(); task >= 0; task = next()) {
      const int64_t unit = task / parts, part = task % parts;
      auto gradients = std::make_unique<KeyGradients>(p);
      for (int64_t i = 0; i < count; ++i)
        if (part_of[i] == part && !backward.block(unit, i, scratch, *gradients)) finite = false;
      {
        const std::lock_guard<std::mutex> guard(mutex);
        sums[unit][part] = std::move(gradients);
        if (++finished[unit] < parts) continue;
      }
      // Whoever finishes a unit adds its parts up, always in the same order.
      for (int64_t other = 1; other < parts; ++other) sums[unit][0]->add(*sums[unit][other]);
      backward.write_keys(unit, *sums[unit][0]);
      sums[unit].clear();
    }
  });
  return finite;
}

}  // namespace

bool differentiate(const Problem& p, const at::Tensor& grad_out, const at::Tensor& statistics, const at::Tensor& grad_q,
                   const at::Tensor& grad_k, const at::Tensor& grad_v, const at::Tensor& grad_lam) {
#ifdef DIFF_TRANSFORMER_BFLOAT16_TILES
  if (grad_out.scalar_type() == at::kBFloat16 && BFloat16Tiles::are_supported())
    return differentiate_kind<BFloat16Tiles>(p, grad_out, statistics, grad_q, grad_k, grad_v, grad_lam);
#endif
#ifdef DIFF_TRANSFORMER_BFLOAT16_PAIRS
  if (grad_out.scalar_type() == at::kBFloat16)
    return differentiate_kind<BFloat16Pair>(p, grad_out, statistics, grad_q, grad_k, grad_v, grad_lam);
#endif
  return differentiate_kind<Float32>(p, grad_out, statistics, grad_q, grad_k, grad_v, grad_lam);
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
