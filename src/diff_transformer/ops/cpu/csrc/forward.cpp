// Forward pass: for a block of queries the scores of both maps are computed once and stored; when the sums of both
// softmaxes are known, the maps are subtracted and multiplied with V once (4d multiply-adds for each visible pair). The
// noise map of a group stays stored while one signal head after the other meets it.
#include <optional>
#include <type_traits>
#include <vector>

#include "block.h"
#include "kernels.h"
#include "parallel.h"
#include "transposed.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

// Exponentials of a chunk's scores, below the highest score that had been seen by then, and their sum so far.
template <class Kind>
struct RunningSoftmax {
  alignas(64) float highest[kStrip], sum[kStrip];

  void reset() {
    std::fill(highest, highest + kStrip, kLowest);
    std::fill(sum, sum + kStrip, 0.0f);
  }

  void update(int vecs, int64_t keys, const float* scores, Vec scale, float* powers, float* reference) {
    for (int v = 0; v < vecs; ++v) {
      const float* x = scores + v * kLanes;
      const Vec before = load(highest + v * kLanes);
      Vec tops[kChains] = {before, before, before, before};
      int64_t j = 0;
      for (; j + kChains <= keys; j += kChains)
        for (int i = 0; i < kChains; ++i) tops[i] = at::vec::clamp_min(load(x + (j + i) * kStrip) * scale, tops[i]);
      for (; j < keys; ++j) tops[0] = at::vec::clamp_min(load(x + j * kStrip) * scale, tops[0]);
      const Vec top = at::vec::clamp_min(at::vec::clamp_min(tops[0], tops[1]), at::vec::clamp_min(tops[2], tops[3]));
      top.store(highest + v * kLanes);
      top.store(reference + v * kLanes);
      (load(sum + v * kLanes) * exp_of_negative(before - top)).store(sum + v * kLanes);
    }
    exponentials(vecs, keys, scores, scale, powers, reference, sum);
  }

  // As the steps of depth of a product, added to `sum`: row by row, as memory is read ahead.
  static void exponentials(int vecs, int64_t keys, const float* scores, Vec scale, float* powers,
                           const float* reference, float* sum) {
    Vec tops[kStripVecs], totals[kStripVecs];
    for (int v = 0; v < vecs; ++v) tops[v] = load(reference + v * kLanes), totals[v] = Vec(0.0f);
    auto step = [&](int64_t j, int64_t count) {
      for (int v = 0; v < vecs; ++v) {
        Vec power[Kind::kDepth];
        for (int i = 0; i < Kind::kDepth; ++i) {
          const float* x = scores + (j + i) * kStrip + v * kLanes;
          power[i] = i < count ? exp_of_negative(load(x) * scale - tops[v]) : Vec(0.0f);
          totals[v] = totals[v] + power[i];
        }
        Kind::store(reinterpret_cast<char*>(powers + j / Kind::kDepth * kStrip + v * kLanes), power);
      }
    };
    int64_t j = 0;
    for (; j + Kind::kDepth <= keys; j += Kind::kDepth) step(j, Kind::kDepth);
    if (j < keys) step(j, keys - j);
    for (int v = 0; v < vecs; ++v) (load(sum + v * kLanes) + totals[v]).store(sum + v * kLanes);
  }
};

// Keys and values lie in memory as `Source`, and are converted a chunk at a time where products take another dtype.
template <class Kind, class Source>
struct Forward {
  using T = typename Kind::Scalar;
  static constexpr bool kConverts = !std::is_same_v<Source, T>;
  const Problem& p;
  const Blocks blocks;
  const Heads<Source> keys, values;
  const std::optional<Transposed<Kind>>& transposed;  // the values, where several blocks of queries share them
  const MapStorage storage;
  T* out;
  float* statistics;

  struct Scratch {
    Buffer<float> queries, mask, scores, weights, sums;
    Buffer<float> powers[2], references[2];
    Buffer<T> rows;  // of a chunk's keys, or of its values
    std::vector<bool> skipped;
    Scratch(const Problem& p, const MapStorage& storage, bool copies_rows)
        : queries(2 * p.d * kStrip),
          mask(Kind::kChunk * kStrip),
          scores(Kind::kChunk * kStrip),
          weights(Kind::kChunk * kStrip),
          sums(p.dv * kStrip),
          powers{Buffer<float>(storage.size / Kind::kDepth), Buffer<float>(storage.size / Kind::kDepth)},
          references{Buffer<float>((p.s / Kind::kChunk + 2) * kStrip),
                     Buffer<float>((p.s / Kind::kChunk + 2) * kStrip)},
          rows(copies_rows ? Kind::kChunk * std::max(p.d, p.dv) : 0) {}
  };

  Left keys_of_chunk(int64_t unit, int c, Range chunk, Scratch& scratch) const {
    const Source* first = keys.row(p, unit, c, chunk.low);
    if constexpr (kConverts) {
      convert_rows(first, keys.row_stride, chunk.size(), p.d, scratch.rows.get());
      return left_rows<Kind>(scratch.rows.get(), p.d);
    } else {
      return left_rows<Kind>(first, keys.row_stride);
    }
  }

  Left values_of_chunk(int64_t unit, Range chunk, Scratch& scratch) const {
    constexpr int64_t size = sizeof(T);
    const Source* first = values.row(p, unit, 0, chunk.low);
    const char* rows = reinterpret_cast<const char*>(scratch.rows.get());
    if constexpr (kConverts) {
      convert_rows(first, values.row_stride, chunk.size(), p.dv, scratch.rows.get());
      return {rows, size, p.dv * size};
    } else if constexpr (Kind::kDepth == 1) {
      return transposed->from(unit, 0, chunk.low);
    } else {
      if (transposed) return transposed->from(unit, 0, chunk.low);
      transpose_chunk(first, values.row_stride, chunk.size(), p.dv, Kind::kChunk, scratch.rows.get());
      return {rows, Kind::kChunk * size, Kind::kDepth * size};
    }
  }

  // Says whether the block's outputs are finite.
  bool block(int64_t unit, int64_t index, Scratch& scratch) const {
    const int64_t batch = unit / p.key_heads, key_head = unit % p.key_heads;
    const Rows rows = blocks.rows(key_head, index);
    RunningSoftmax<Kind> softmax[2];
    bool finite = true;
    for (int64_t signal = 0; signal < p.ratio; ++signal)
      if (!signal_head(unit, batch, rows, signal, softmax, scratch)) finite = false;
    return finite;
  }

  // The outputs of a block's queries in one signal head of their group. The first of them computes the noise map too.
  bool signal_head(int64_t unit, int64_t batch, const Rows& rows, int64_t signal, RunningSoftmax<Kind>* softmax,
                   Scratch& scratch) const {
    const int vecs = rows.vecs, new_maps = signal == 0 ? 2 : 1;
    const int64_t map_of[2] = {signal, p.ratio};
    for (int c = 0; c < new_maps; ++c) {
      softmax[c].reset();
      pack_lanes<Kind>(rows, p.d, [&](int r) { return query_row<T>(p, batch, rows, map_of[c], r); },
                       scratch.queries.get() + c * p.d * kStrip);
    }
    float* scores = scratch.scores.get();
    auto score = [&](Range chunk, bool edge, Visible mask, int c) {
      return score_chunk<Kind>(p, rows, chunk, edge, keys_of_chunk(unit, c, chunk, scratch),
                               scratch.queries.get() + c * p.d * kStrip,
                               mask == Visible::kSome ? scratch.mask.get() : nullptr, scores);
    };
    auto powers = [&](Range chunk, int c) {
      return scratch.powers[c].get() + storage.offset(rows, chunk) / Kind::kDepth;
    };
    scratch.skipped.clear();
    for_each_chunk<Kind>(rows, [&](Range chunk, bool edge, int64_t number) {
      const Visible mask = mask_tile(p, batch, rows, chunk, scratch.mask.get());
      scratch.skipped.push_back(mask == Visible::kNone);
      if (mask == Visible::kNone) return;
      for (int c = 0; c < new_maps; ++c) {
        float* reference = scratch.references[c].get() + number * kStrip;
        const Vec scale = score(chunk, edge, mask, c);
        softmax[c].update(vecs, chunk.size(), scores, scale, powers(chunk, c), reference);
      }
    });
    alignas(64) float lambdas[kStrip], signals[kStrip], inverse[2][kStrip];
    for (int r = 0; r < kStrip; ++r) {
      lambdas[r] = lambda_of(p, batch, rows, signal, r);
      signals[r] = signal_of(p, batch, rows, signal, r);
      for (int c = 0; c < 2; ++c) inverse[c][r] = softmax[c].sum[r] > 0.0f ? 1.0f / softmax[c].sum[r] : 0.0f;
    }
    float* sums = scratch.sums.get();
    std::fill(sums, sums + p.dv * kStrip, 0.0f);
    for_each_chunk<Kind>(rows, [&](Range chunk, bool edge, int64_t number) {
      if (scratch.skipped[number]) return;
      if (!storage.all) {
        const Visible mask = mask_tile(p, batch, rows, chunk, scratch.mask.get());
        for (int c = 0; c < 2; ++c) {
          const Vec scale = score(chunk, edge, mask, c);
          alignas(64) float unused[kStrip] = {};
          RunningSoftmax<Kind>::exponentials(vecs, chunk.size(), scores, scale, powers(chunk, c),
                                             scratch.references[c].get() + number * kStrip, unused);
        }
      }
      Vec factors[2][kStripVecs];
      for (int v = 0; v < vecs; ++v)
        for (int c = 0; c < 2; ++c) {
          const int lane = v * kLanes;
          const Vec reference = load(scratch.references[c].get() + number * kStrip + lane);
          const Vec factor = exp_of_negative(reference - load(softmax[c].highest + lane)) * load(inverse[c] + lane);
          factors[c][v] = factor * load((c == 0 ? signals : lambdas) + lane);
        }
      auto row = [](float* x, int64_t j, int v) {
        return reinterpret_cast<char*>(x + j / Kind::kDepth * kStrip + v * kLanes);
      };
      int64_t j = 0;
      for (; j < chunk.size(); j += Kind::kDepth)
        for (int v = 0; v < vecs; ++v) {
          Vec one[Kind::kDepth], other[Kind::kDepth], weights[Kind::kDepth];
          Kind::unpack(row(powers(chunk, 0), j, v), one);
          Kind::unpack(row(powers(chunk, 1), j, v), other);
          for (int i = 0; i < Kind::kDepth; ++i)
            weights[i] = at::vec::fmsub(one[i], factors[0][v], other[i] * factors[1][v]);
          Kind::store(row(scratch.weights.get(), j, v), weights);
        }
      for (; j % Kind::kTile; j += Kind::kDepth)
        for (int v = 0; v < vecs; ++v) Vec(0.0f).store(row(scratch.weights.get(), j, v));
      multiply_channels<Kind>(rows, chunk, edge, values_of_chunk(unit, chunk, scratch), scratch.weights.get(), p.dv,
                              sums);
    });
    unpack_lanes<Kind>(rows, p.dv, sums, [&](int r) {
      return out + ((batch * p.heads + head_of(p, rows, signal, r)) * p.n + rows.query[r]) * p.dv;
    });
    for (int r = 0; r < rows.count; ++r)
      for (int c = 0; c < new_maps; ++c) {
        float* to = statistics + map_index(p, batch, rows, map_of[c], r, 2);
        to[0] = softmax[c].highest[r];
        to[p.n] = inverse[c][r];
      }
    return are_finite(sums, p.dv * kStrip);
  }
};

template <class Kind, class Source = typename Kind::Scalar>
bool attend_kind(const Problem& p, const Results& results) {
  using T = typename Kind::Scalar;
  const Blocks blocks(p, block_rows(p, thread_count()));
  std::optional<Transposed<Kind>> transposed;
  if constexpr (std::is_same_v<Source, T>)
    if (Kind::kDepth == 1 || blocks.count > 1) transposed.emplace(p, values_of<T>(p));
  const Forward<Kind, Source> forward{p,
                                      blocks,
                                      keys_of<Source>(p),
                                      values_of<Source>(p),
                                      transposed,
                                      MapStorage(blocks, Kind::kChunk),
                                      static_cast<T*>(results.out),
                                      results.statistics};
  const int64_t count = forward.blocks.count;
  std::atomic<bool> finite{true};
  share_tasks(p.units() * count, [&](const auto& next) {
    const Products<Kind> products;
    typename Forward<Kind, Source>::Scratch scratch(p, forward.storage, !transposed);
    // The last queries first: under causality they are the most work.
    for (int64_t task = next(); task >= 0; task = next())
      if (!forward.block(task / count, count - 1 - task % count, scratch)) finite = false;
  });
  return finite;
}

}  // namespace

bool multiplies_bfloat16() {
#ifdef DIFF_TRANSFORMER_BFLOAT16_PAIRS
  return true;
#else
  return false;
#endif
}

std::string bfloat16_products() {
#ifdef DIFF_TRANSFORMER_BFLOAT16_PAIRS
  if (BFloat16Tiles::are_supported()) return "AMX";
#endif
  return multiplies_bfloat16() ? "AVX512-BF16" : "float32";
}

bool attend(const Problem& p, ScalarType source, const Results& results) {
#ifdef DIFF_TRANSFORMER_BFLOAT16_PAIRS
  if (results.dtype == ScalarType::BFloat16 && BFloat16Tiles::are_supported())
    return attend_kind<BFloat16Tiles>(p, results);
  if (results.dtype == ScalarType::BFloat16) return attend_kind<BFloat16Pair>(p, results);
#endif
  switch (source) {
    case ScalarType::BFloat16: return attend_kind<Float32, c10::BFloat16>(p, results);
    case ScalarType::Half: return attend_kind<Float32, c10::Half>(p, results);
    default: return attend_kind<Float32>(p, results);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
