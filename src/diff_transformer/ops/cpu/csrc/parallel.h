// Tasks handed to torch's threads one by one, whoever is free.
#pragma once

#include <ATen/Parallel.h>

#include <atomic>

namespace diff_transformer {

// Calls body(next) once in each of at most `tasks` threads; next() gives a task, or −1 when none is left.
template <class Body>
void share_tasks(int64_t tasks, const Body& body) {
  std::atomic<int64_t> taken{0};
  auto next = [&]() -> int64_t {
    const int64_t task = taken.fetch_add(1, std::memory_order_relaxed);
    return task < tasks ? task : -1;
  };
  const int64_t threads = std::min<int64_t>(at::get_num_threads(), tasks);
  at::parallel_for(0, threads, 1, [&](int64_t, int64_t) { body(next); });
}

}  // namespace diff_transformer
