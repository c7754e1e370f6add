// Tasks handed to torch's threads one by one, whoever is free.
#pragma once

#include <torch/csrc/stable/c/shim.h>

#include <algorithm>
#include <atomic>
#include <exception>
#include <stdexcept>
#include <vector>

namespace diff_transformer {
inline namespace CPU_CAPABILITY {

inline int64_t thread_count() {
  uint32_t count = 1;
  if (torch_get_num_threads(&count) != AOTI_TORCH_SUCCESS) throw std::runtime_error("torch has no threads");
  return count;
}

// Calls body(begin, end) for parts of a range in torch's threads. The first error is thrown again in the calling thread:
// torch's stable interface would lose it.
template <class Body>
void parallel_for(int64_t count, const Body& body) {
  struct Call {
    const Body& body;
    std::atomic<bool> failed{false};
    std::exception_ptr error;
  } call{body};
  auto run = [](int64_t begin, int64_t end, void* context) {
    auto& call = *static_cast<Call*>(context);
    try {
      call.body(begin, end);
    } catch (...) {
      if (!call.failed.exchange(true)) call.error = std::current_exception();
    }
  };
  if (torch_parallel_for(0, count, 1, run, &call) != AOTI_TORCH_SUCCESS) throw std::runtime_error("a thread failed");
  if (call.error) std::rethrow_exception(call.error);
}

// Calls body() once in each of at most `tasks` threads.
template <class Body>
void in_threads(int64_t tasks, const Body& body) {
  parallel_for(std::min(thread_count(), tasks), [&](int64_t, int64_t) { body(); });
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
  const int64_t threads = std::min(thread_count(), tasks);
  struct alignas(64) Share {
    std::atomic<int64_t> taken{0};
  };
  std::vector<Share> shares(threads);
  parallel_for(threads, [&](int64_t own, int64_t) {
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

}  // namespace CPU_CAPABILITY
}  // namespace diff_transformer
