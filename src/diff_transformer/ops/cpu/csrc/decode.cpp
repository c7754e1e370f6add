// Few queries against many keys, as when decoding with a cache. What counts there is that every key and value is read
// from memory once, in order: the channels are the lanes, both maps are met at once, and the maps are subtracted before
// the one pass over the values. Where heads are few, their keys are shared out among the threads.
#include <cmath>
#include <cstring>
#include <type_traits>

#include "block.h"
#include "bytes.h"
#include "kernels.h"
#include "parallel.h"

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

namespace {

constexpr int64_t kFewRows = kLanes == 16 ? 8 : 4;  // with more, lanes of queries cost less; 8 measured with AVX-512 alone
constexpr int64_t kFewOfPairs = 4;   // sooner where instructions multiply bfloat16
constexpr int64_t kMostRows = 16;    // unless that would leave threads without work
constexpr int64_t kMostPackedRows = 32;  // with more it pays to unpack bytes
constexpr int64_t kLeastKeys = 256;  // worth a task of its own
constexpr int64_t kKeys = 64;        // values that stay in the first level of cache while all rows meet them
constexpr int kValueVecs = 8;        // vectors of a value that are summed in registers
// Keys and values that the last level of cache does not hold from one token to the next are prefetched: the
// processor itself looks ahead only to the end of a page. Where it does hold them, prefetching costs more than it gains.
constexpr int64_t kAhead = 16;  // keys
constexpr int64_t kFarBytes = 24 << 20;
constexpr int64_t kAheadPacked = 64;  // rows of bytes, always: they take less to compute with than to read

// Lanes of two vectors that each hold some sums, added in neighbouring pairs: the first's sums, then the second's.
Vec add_neighbours(Vec x, Vec y) {
  const auto halves = at::vec::deinterleave2(x, y);
  return halves.first + halves.second;
}

// Of one split of the keys, query and map: the highest score, and the sum of exponentials below it.
struct Partial {
  float highest, sum;
};

// Queries and outputs are of type T. What is stored is too, or rows of int8 as ops/packed.py makes them: behind the
// numbers of a token's value, or of its keys for all maps, stands their factor, a float32.
template <class T, class Stored>
struct Decode {
  static constexpr bool kIsPacked = std::is_same_v<Stored, int8_t>;
  static constexpr bool kHasBytes = kIsPacked && kMultipliesBytes<T>;
  static_assert(kKeys == kInterleaved);
  const Problem& p;
  const HeadwiseNorm& norm;
  const Heads<Stored> keys, values;
  const Range seen;  // by the queries between them
  const int64_t rows, splits, split_size;  // a row: a query of a group
  const int64_t depth, width;  // of a query and of a value, in whole vectors
  const bool far;
  const int64_t spread;        // a row of scores: each split has kLanes to spare, since it may begin at any key
  Partial* partials;           // [unit][split][row][map], the signal heads' r maps and then their noise map
  float* sums;                 // [unit][split][row][signal head][width]

  int64_t maps() const { return p.ratio + 1; }  // of a row

  int64_t group(int64_t unit, int64_t row) const { return unit % p.key_heads * p.groups_of_key_head() + row / p.n; }

  Range range(int64_t split) const {
    const int64_t high = std::min(seen.high, (split + 1) * split_size);
    return {std::min(std::max(split * split_size, seen.low), high), high};
  }

  // Where the score of a key stands in its row.
  int64_t score_index(int64_t split, int64_t key) const { return split * kLanes + key; }

  // Queries as [row][map][depth], zeros behind their width.
  void read_queries(int64_t unit, float* to) const {
    for (int64_t m = 0; m < maps() * rows; ++m) {
      const int64_t row = m / maps();
      const T* q = static_cast<const T*>(p.q) + unit / p.key_heads * p.q_batch + group(unit, row) * p.q_group +
                   m % maps() * p.q_map + row % p.n * p.q_row;
      for (int64_t k = 0; k < depth; ++k) to[m * depth + k] = k < p.d ? static_cast<float>(q[k]) : 0.0f;
    }
  }

  // Exponentials of the scores of a split, in [row][map][spread], and what they add up to.
  void score(int64_t unit, int64_t split, const float* queries, float* scores) const {
    const Range keys_seen = range(split);
    float* first = scores + score_index(split, 0);
    multiply_all(unit, keys_seen, queries, first);
    const Vec factor(p.scale);
    for (int64_t m = 0; m < maps() * rows; ++m) {
      float* x = first + m * spread + keys_seen.low;
      const int64_t count = keys_seen.size(), padded = divide_up(count, kLanes) * kLanes;
      for (int64_t j = 0; j < count; j += kLanes) (load(x + j) * factor).store(x + j);
      add_mask(unit, m / maps(), keys_seen, x);
      std::fill(x + count, x + padded, kHidden);
      Vec top(kLowest), total(0.0f);
      for (int64_t j = 0; j < count; j += kLanes) top = at::vec::clamp_min(load(x + j), top);
      const float highest = largest(top);
      for (int64_t j = 0; j < count; j += kLanes) {
        const Vec power = exp_of_negative(load(x + j) - Vec(highest));
        power.store(x + j);
        total = total + power;
      }
      partials[(unit * splits + split) * rows * maps() + m] = {highest, sum(total)};
    }
  }

  // scores[row][map][key] = query · key.
  void multiply_all(int64_t unit, Range range, const float* queries, float* scores) const {
    if constexpr (kHasBytes) {
      switch (divide_up(p.d, kBytes)) {  // with more, products would not stay below 2^31
        case 1: return multiply_rows<1>(unit, range, queries, scores);
        case 2: return multiply_rows<2>(unit, range, queries, scores);
        case 3: return multiply_rows<3>(unit, range, queries, scores);
        case 4: return multiply_rows<4>(unit, range, queries, scores);
      }
    }
    switch (p.d % kLanes ? 0 : p.d / kLanes) {
      case 1: multiply<1>(unit, range, queries, scores); break;
      case 2: multiply<2>(unit, range, queries, scores); break;
      case 3: multiply<3>(unit, range, queries, scores); break;
      case 4: multiply<4>(unit, range, queries, scores); break;
      case 5: multiply<5>(unit, range, queries, scores); break;
      case 6: multiply<6>(unit, range, queries, scores); break;
      case 7: multiply<7>(unit, range, queries, scores); break;
      case 8: multiply<8>(unit, range, queries, scores); break;
      default: multiply<0>(unit, range, queries, scores);
    }
  }

  // The same for queries of V vectors of bytes.
  template <int V>
  void multiply_rows(int64_t unit, Range range, const float* queries, float* scores) const {
    const int64_t size = V * kBytes;
    const Buffer<int8_t> bytes(rows * maps() * 2 * size);
    const Buffer<TwoBytes> of_queries(rows * maps());
    std::fill_n(bytes.get(), rows * maps() * 2 * size, int8_t{0});
    for (int64_t m = 0; m < rows * maps(); ++m) {
      int8_t* high = bytes.get() + m * 2 * size;
      of_queries.get()[m] = to_two_bytes(queries + m * depth, depth, high, high + size);
    }
    for (int64_t j = range.low; j < range.high; j += kLanes) {
      const Vec factors = key_factors(unit, j, range.high);
      for (int64_t m = 0; m < rows * maps(); ++m) {
        const int8_t* high = bytes.get() + m * 2 * size;
        const TwoBytes query = of_queries.get()[m];
        const Vec products = multiply_bytes<V>(query, high, high + size, p.d, keys.head(p, unit, m % maps() == p.ratio),
                                               keys.row_stride, j, range.high - 1);
        (products * factors).store(scores + m * spread + j);
      }
    }
  }

  // The same for keys of V whole vectors (0: any width). Two maps of a row go together.
  template <int V>
  void multiply(int64_t unit, Range range, const float* queries, float* scores) const {
    const int64_t pairs = divide_up(maps(), 2);
    for (int64_t j = range.low; j < range.high; j += kLanes) {
      const Vec factors = kIsPacked ? key_factors(unit, j, range.high) : Vec(1.0f);
      for (int64_t pair = 0; pair < rows * pairs; ++pair) {
        Query<V> query;
        const Stored* heads[2];
        int64_t chosen[2];
        for (int c = 0; c < 2; ++c) {
          const int64_t map = std::min(pair % pairs * 2 + c, p.ratio);  // of an odd number the last one twice
          chosen[c] = pair / pairs * maps() + map;
          heads[c] = keys.head(p, unit, map == p.ratio);
          query.rows[c] = queries + chosen[c] * depth;
          for (int k = 0; k < V; ++k) query.parts[c][k] = load(query.rows[c] + k * kLanes);
        }
        const int64_t ahead = far && pair < pairs ? std::min(j + kAhead + kLanes, range.high) : 0;  // once for all rows
        for (int64_t i = j + kAhead; i < ahead; ++i)
          for (const Stored* head : heads) prefetch(head + i * keys.row_stride, p.d);
        const Both products = multiply_keys<V, kLanes>(query, heads, j, range.high - 1);
        for (int c = 0; c < 2; ++c) (products.map[c] * factors).store(scores + chosen[c] * spread + j);
      }
    }
  }

  // Of some packed rows of `width` numbers; those far behind them are prefetched.
  void read_factors(const Heads<Stored>& heads, int64_t unit, int64_t width, Range range, float* factors) const {
    const Stored* head = heads.head(p, unit, 0);
    for (int64_t j = range.low; j < range.high; ++j) {
      std::memcpy(factors + j - range.low, head + j * heads.row_stride + width, sizeof(float));
      if (j + kAheadPacked < p.s) prefetch(head + (j + kAheadPacked) * heads.row_stride, width);
    }
  }

  // Of at most kLanes keys from `first` on.
  Vec key_factors(int64_t unit, int64_t first, int64_t end) const {
    alignas(64) float factors[kLanes] = {};
    read_factors(keys, unit, p.key_maps * p.d, {first, std::min(first + kLanes, end)}, factors);
    return load(factors);
  }

  template <int V>
  struct Query {
    Vec parts[2][V ? V : 1];
    const float* rows[2];
  };

  struct Both {
    Vec map[2];
  };

  // Products with keys j … j + Count − 1 (or `last` again), each over kLanes / Count lanes that are yet to be added up.
  // In a cache the two keys of a token lie side by side: they are read together.
  template <int V, int Count>
  inline __attribute__((always_inline)) Both multiply_keys(const Query<V>& query, const Stored* const* heads,
                                                           int64_t j,
                                                           int64_t last) const {
    Both out;
    if constexpr (Count == 1) {
      const int64_t offset = std::min(j, last) * keys.row_stride;
      for (int c = 0; c < 2; ++c) {
        const Stored* key = heads[c] + offset;
        Vec product(0.0f);
        for (int k = 0; k < V; ++k) product = at::vec::fmadd(load_row(key + k * kLanes), query.parts[c][k], product);
        for (int64_t k = 0; V == 0 && k < p.d; k += kLanes)
          product = at::vec::fmadd(load_row(key + k, p.d - k), load(query.rows[c] + k), product);
        out.map[c] = product;
      }
    } else {
      const Both x = multiply_keys<V, Count / 2>(query, heads, j, last);
      const Both y = multiply_keys<V, Count / 2>(query, heads, j + Count / 2, last);
      for (int c = 0; c < 2; ++c) out.map[c] = add_neighbours(x.map[c], y.map[c]);
    }
    return out;
  }

  // Adds the mask to the scores of a row, and hides what position hides.
  void add_mask(int64_t unit, int64_t row, Range range, float* scores) const {
    const Range of_row = seen_by(p, row % p.n);
    for (int64_t j = range.low; j < std::min(range.high, of_row.low); ++j) scores[j - range.low] = kHidden;
    for (int64_t j = std::max(range.low, of_row.high); j < range.high; ++j) scores[j - range.low] = kHidden;
    if (p.mask_kind == MaskKind::kNone) return;
    const int64_t start = unit / p.key_heads * p.mask_batch + group(unit, row) * p.mask_head + row % p.n * p.mask_row;
    for (int64_t j = range.low; j < range.high; ++j) {
      const int64_t at = start + j * p.mask_key;
      if (p.mask_kind == MaskKind::kFloat) {
        const float addend = static_cast<const float*>(p.mask)[at];
        scores[j - range.low] = addend == kHidden ? kHidden : scores[j - range.low] + addend;
      } else if (!static_cast<const bool*>(p.mask)[at]) {
        scores[j - range.low] = kHidden;
      }
    }
  }

  // The highest score of all splits, and one over the sum of the exponentials (0 where nothing is seen).
  Partial over_splits(int64_t unit, int64_t m) const {
    const Partial* of_split = partials + unit * splits * rows * maps() + m;
    const int64_t step = rows * maps();
    Partial all{kLowest, 0.0f};
    for (int64_t split = 0; split < splits; ++split)
      all.highest = std::max(all.highest, of_split[split * step].highest);
    for (int64_t split = 0; split < splits; ++split)
      all.sum += of_split[split * step].sum * std::exp(of_split[split * step].highest - all.highest);
    return {all.highest, all.sum > 0.0f ? 1.0f / all.sum : 0.0f};
  }

  // Which of all heads of the batch entry.
  int64_t head(int64_t unit, int64_t row, int64_t signal) const { return group(unit, row) * p.ratio + signal; }

  float lambda(int64_t unit, int64_t row, int64_t signal) const {
    return p.lam[unit / p.key_heads * p.lam_batch + head(unit, row, signal) * p.lam_head + row % p.n * p.lam_row];
  }

  float signal_weight(int64_t unit, int64_t row, int64_t signal) const {
    if (!p.signal) return 1.0f;
    return p.signal[unit / p.key_heads * p.signal_batch + head(unit, row, signal) * p.signal_head +
                    row % p.n * p.signal_row];
  }

  // The difference of the maps times the values of a split, and whether that is finite. All splits of the unit have
  // been scored.
  bool add_values(int64_t unit, int64_t split, float* scores) const {
    const Range seen = range(split);
    const int64_t heads = rows * p.ratio;
    float* sums_of_split = sums + (unit * splits + split) * heads * width;
    std::fill(sums_of_split, sums_of_split + heads * width, 0.0f);
    auto scores_of = [&](int64_t m) { return scores + m * spread + score_index(split, 0); };
    for (int64_t i = 0; i < heads; ++i) {
      const int64_t row = i / p.ratio, signal = i % p.ratio, m = row * maps() + signal, noise = row * maps() + p.ratio;
      auto factor = [&](int64_t map) {
        const Partial all = over_splits(unit, map);
        const Partial of_split = partials[(unit * splits + split) * rows * maps() + map];
        return all.sum * std::exp(of_split.highest - all.highest);
      };
      const Vec a(factor(m) * signal_weight(unit, row, signal)), b(factor(noise) * lambda(unit, row, signal));
      float *first = scores_of(m), *second = scores_of(noise);
      for (int64_t j = seen.low; j < seen.high; j += kLanes)
        (load(first + j) * a - load(second + j) * b).store(first + j);
    }
    const Stored* head = values.head(p, unit, 0);
    const int64_t interleaved = kHasBytes ? p.dv / kBytes * kBytes : 0;  // channels
    const Buffer<int8_t> bytes(interleaved * kKeys);
    for (int64_t low = seen.low; low < seen.high; low += kKeys) {
      const int64_t count = std::min(kKeys, seen.high - low);
      const Stored* value = head + low * values.row_stride;
      alignas(64) float factors[kKeys], scaled[kKeys] = {};
      if constexpr (kIsPacked) read_factors(values, unit, p.dv, {low, low + count}, factors);
      if constexpr (kHasBytes) interleave_rows(value, values.row_stride, count, interleaved, bytes.get());
      for (int64_t i = 0; i < heads; ++i) {
        const float* weights = scores_of(i / p.ratio * maps() + i % p.ratio) + low;
        if constexpr (kIsPacked) {
          for (int64_t j = 0; j < count; ++j) scaled[j] = weights[j] * factors[j];
          weights = scaled;
        }
        float* to = sums_of_split + i * width;
        int64_t c = 0;
        if constexpr (kHasBytes) {
          int8_t upper[kKeys], lower[kKeys];
          const TwoBytes of_row = to_two_bytes(weights, kKeys, upper, lower);
          for (; c < interleaved; c += kBytes)
            add_interleaved(of_row, upper, lower, bytes.get() + c * kKeys, count, to + c);
        }
        for (; c + kValueVecs * kLanes <= p.dv; c += kValueVecs * kLanes)
          far ? add_some<kValueVecs, true>(value + c, kLanes, count, weights, to + c)
              : add_some<kValueVecs, false>(value + c, kLanes, count, weights, to + c);
        for (; c < p.dv; c += kLanes) add_some<1, false>(value + c, p.dv - c, count, weights, to + c);
      }
    }
    return are_finite(sums_of_split, heads * width);
  }

  static void prefetch(const Stored* row, int64_t width) {
    for (int64_t i = 0; i < width; i += 64 / static_cast<int64_t>(sizeof(Stored))) __builtin_prefetch(row + i);
  }

  // N vectors of channels; the last of them may have only `channels` lanes.
  template <int N, bool kFar>
  void add_some(const Stored* value, int64_t channels, int64_t count, const float* weights, float* to) const {
    Vec total[N];
    for (int v = 0; v < N; ++v) total[v] = Vec(0.0f);
    for (int64_t j = 0; j < count; ++j, value += values.row_stride) {
      const Vec weight(weights[j]);
      if (kFar && j + kAhead < count) prefetch(value + kAhead * values.row_stride, N * kLanes);
      for (int v = 0; v < N; ++v) {
        const Vec x = N > 1 ? load_row(value + v * kLanes) : load_row(value, channels);
        total[v] = at::vec::fmadd(weight, x, total[v]);
      }
    }
    for (int v = 0; v < N; ++v) (load(to + v * kLanes) + total[v]).store(to + v * kLanes);
  }

  // A row of sums, which are 0 behind dv.
  void normalise(float* total) const {
    Vec squares(0.0f);
    for (int64_t c = 0; c < width; c += kLanes) squares = at::vec::fmadd(load(total + c), load(total + c), squares);
    const float factor = norm.factor / std::sqrt(sum(squares) / static_cast<float>(p.dv) + norm.eps);
    for (int64_t c = 0; c < p.dv; ++c) total[c] *= factor * norm.weight[c];
  }

  // Adds up the splits of a unit, into the sums of the first, and normalises them.
  void finish(int64_t unit, T* out, float* statistics) const {
    const int64_t batch = unit / p.key_heads;
    for (int64_t row = 0; row < rows; ++row) {
      for (int64_t signal = 0; signal < p.ratio; ++signal) {
        const int64_t heads = rows * p.ratio;
        float* total = sums + (unit * splits * heads + row * p.ratio + signal) * width;
        for (int64_t split = 1; split < splits; ++split) {
          const float* of_split = total + split * heads * width;
          for (int64_t c = 0; c < width; c += kLanes) (load(total + c) + load(of_split + c)).store(total + c);
        }
        if (norm.weight) normalise(total);
        T* to = out + ((batch * p.heads + head(unit, row, signal)) * p.n + row % p.n) * p.dv;
        at::vec::convert(total, to, p.dv);
      }
      for (int64_t map = 0; map < maps(); ++map) {
        const Partial all = over_splits(unit, row * maps() + map);
        float* to = statistics + ((batch * p.groups() + group(unit, row)) * maps() + map) * 2 * p.n + row % p.n;
        to[0] = all.highest;
        to[p.n] = all.sum;
      }
    }
  }
};

template <class T, class Stored>
bool decode_type(const Problem& p, const HeadwiseNorm& norm, const Results& results) {
  const int64_t rows = p.groups_of_key_head() * p.n, threads = thread_count(), maps = rows * (p.ratio + 1);
  const int64_t wanted = p.units() < 2 * threads ? divide_up(2 * threads, p.units()) : 1;
  const int64_t split_size = divide_up(divide_up(p.s, std::min(wanted, divide_up(p.s, kLeastKeys))), kLanes) * kLanes;
  const int64_t splits = divide_up(p.s, split_size), tasks = p.units() * splits;
  const int64_t depth = divide_up(p.d, kLanes) * kLanes, width = divide_up(p.dv, kLanes) * kLanes;
  const int64_t spread = splits * (split_size + kLanes);
  const Buffer<Partial> partials(tasks * maps);
  const Buffer<float> sums(tasks * rows * p.ratio * width);
  const int64_t bytes = p.units() * p.s * (p.key_maps * p.d + p.dv) * static_cast<int64_t>(sizeof(Stored));
  const bool far = std::is_same_v<T, Stored> && bytes > kFarBytes;
  Range seen{0, 0};
  for (int64_t query = 0; query < p.n; ++query) widen(seen, seen_by(p, query));
  const Decode<T, Stored> decode{p, norm, keys_of<Stored>(p), values_of<Stored>(p), seen, rows, splits, split_size, depth,
                                 width, far, spread, partials.get(), sums.get()};
  T* out = static_cast<T*>(results.out);
  std::atomic<bool> finite{true};
  if (splits == 1) {
    share_cached_tasks(tasks, [&](const auto& next) {
      const Buffer<float> queries(maps * depth), scores(maps * spread);
      for (int64_t unit = next(); unit >= 0; unit = next()) {
        decode.read_queries(unit, queries.get());
        decode.score(unit, 0, queries.get(), scores.get());
        if (!decode.add_values(unit, 0, scores.get())) finite = false;
        decode.finish(unit, out, results.statistics);
      }
    });
    return finite;
  }
  const Buffer<float> scores(p.units() * maps * spread);
  share_cached_tasks(tasks, [&](const auto& next) {
    const Buffer<float> queries(maps * depth);
    for (int64_t task = next(); task >= 0; task = next()) {
      decode.read_queries(task / splits, queries.get());
      decode.score(task / splits, task % splits, queries.get(), scores.get() + task / splits * maps * spread);
    }
  });
  share_cached_tasks(tasks, [&](const auto& next) {
    for (int64_t task = next(); task >= 0; task = next())
      if (!decode.add_values(task / splits, task % splits, scores.get() + task / splits * maps * spread))
        finite = false;
  });
  for (int64_t unit = 0; unit < p.units(); ++unit) decode.finish(unit, out, results.statistics);
  return finite;
}

template <class T>
bool decode_dtype(const Problem& p, bool packed, const HeadwiseNorm& norm, const Results& results) {
  return packed ? decode_type<T, int8_t>(p, norm, results) : decode_type<T, T>(p, norm, results);
}

}  // namespace

bool has_few_queries(ScalarType source, int64_t rows, int64_t units) {
  if (source == ScalarType::Char) return rows <= kMostPackedRows;
  const bool pairs = source == ScalarType::BFloat16 && multiplies_bfloat16();
  return rows <= (pairs ? kFewOfPairs : kFewRows) || (rows <= kMostRows && units < thread_count());
}

bool decode(const Problem& p, ScalarType source, const HeadwiseNorm& norm, const Results& results) {
  const bool packed = source == ScalarType::Char;
  switch (results.dtype) {
    case ScalarType::BFloat16: return decode_dtype<c10::BFloat16>(p, packed, norm, results);
    case ScalarType::Half: return decode_dtype<c10::Half>(p, packed, norm, results);
    default: return decode_dtype<float>(p, packed, norm, results);
  }
}

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
