// Tasks handed to torch's threads one by one, whoever is free.
#pragma once

#include <ATen/Parallel.h>

#include <algorithm>
#include <atomic>
#include <vector>

namespace diff_transformer {

// Calls body() once in each of at most `tasks` threads.
template <class Body>
void in_threads(int64_t tasks, const Body& body) {
  at::parallel_for(0, std::min<int64_t>(at::get_num_threads(), tasks), 1, [&](int64_t, int64_t) { body(); });
}

// Calls body(next) once in each of at most `tasks` threads; next() gives a task, or −1 when none is left.
template <class Body>
void share_tasks(int64_t tasks, const Body& body) {
  std::atomic<int64_t> taken{0};
  auto next = [&]() -> int64_t {
    const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? task : -1;
  };
  in_threads(tasks, [&] { body(next); });
}

// The same, but each thread begins with a share of its own, the same in every call: a cache that is read once a token
// may still be in the thread's own level of cache. Then it takes what others have left.
template <class Body>
void share_cached_tasks(int64_t tasks, const Body& body) {
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
  };
  std::vector<Share> shares(threads);
  at::parallel_for(0, threads, 1, [&](int64_t own, int64_t) {
    int64_t met = 0;  // shares that are empty
    auto next = [&]() -> int64_t {
      for (; met < threads; ++met) {
        const int64_t share = (own + met) % threads, first = tasks * share / threads;
        const int64_t task = first + shares[share].taken.fetch_add(1, std::memory_order_relaxed);
        if (task < tasks * (share + 1) / threads) return task;
      }
      return -1;
    };
    body(next);
  });
}

}  // namespace diff_transformer
