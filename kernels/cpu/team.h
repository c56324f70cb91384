// A team of threads that share work: the calling thread, and workers that wait for it.
//
// Free threads take pieces of work one at a time. A thread that loses its core to another process
// therefore delays only its current piece, and a sleeping one delays nothing.

#pragma once

#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <climits>
#include <cstdint>
#include <thread>

namespace {

constexpr int64_t SMALL = 1 << 16;  // bytes that one thread reads before another has woken up
constexpr int PIECES = 4;           // pieces of work per thread, if the work can be cut anywhere

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

}  // namespace

class Team {
   public:
    explicit Team(int threads) : threads_(threads) {
        for (int worker = 1; worker < threads; worker++) std::thread([this] { serve(); }).detach();
    }

    int threads() const { return threads_; }

    // Calls work(piece) for every piece below `count`, on any of the threads, and returns when all are
    // done. Any thread may call it. While one call runs, another one works alone.
    template <class Work>
    void share(int64_t count, Work& work) {
        if (threads_ == 1 || count <= 1 || count >= CLOSED || busy_.exchange(true)) {
            for (int64_t piece = 0; piece < count; piece++) work(piece);
            return;
        }
        run(count, [](void* work, int64_t piece) { (*(Work*)work)(piece); }, &work);
        busy_.store(false, std::memory_order_release);
    }

   private:
    using Call = void (*)(void*, int64_t);

    static constexpr int64_t CLOSED = UINT32_MAX;  // a ticket without a piece
    // Some 10 us pass between two products of a step, and more between two steps.
    static constexpr std::chrono::microseconds AWAKE{100};

    void run(int64_t count, Call call, void* work) {
        uint64_t number = (ticket_.load(std::memory_order_relaxed) >> 32) + 1;
        ticket_.store(number << 32 | CLOSED, std::memory_order_relaxed);
        // A thread that sees any of these stores also sees the closed ticket, so it takes no piece.
        std::atomic_thread_fence(std::memory_order_release);
        call_.store(call, std::memory_order_relaxed);
        work_.store(work, std::memory_order_relaxed);
        count_.store(count, std::memory_order_relaxed);
        done_.store(0, std::memory_order_relaxed);
        ticket_.store(number << 32, std::memory_order_release);
        published_.fetch_add(1);
        if (asleep_.load()) futex(FUTEX_WAKE_PRIVATE, INT_MAX);
        take();
        for (int turns = 0; done_.load(std::memory_order_acquire) != count; turns++)
            turns < 1 << 10 ? relax() : (void)sched_yield();
    }

    // Works on pieces until all are taken.
    void take() {
        uint64_t ticket = ticket_.load(std::memory_order_acquire);
        for (;;) {
            Call call = call_.load(std::memory_order_relaxed);
            void* work = work_.load(std::memory_order_relaxed);
            int64_t count = count_.load(std::memory_order_relaxed);
            std::atomic_thread_fence(std::memory_order_acquire);
            int64_t piece = ticket & UINT32_MAX;
            if (piece == CLOSED || piece >= count) return;
            if (!ticket_.compare_exchange_weak(ticket, ticket + 1, std::memory_order_acq_rel))
                continue;
            call(work, piece);
            done_.fetch_add(1, std::memory_order_release);
            ticket = ticket_.load(std::memory_order_acquire);
        }
    }

    [[noreturn]] void serve() {
        for (uint32_t seen = 0;; seen = published_.load()) {
            take();
            wait(seen);
        }
    }

    // Returns when more work has been published than `seen`.
    void wait(uint32_t seen) {
        auto end = std::chrono::steady_clock::now() + AWAKE;
        for (int turns = 1; published_.load(std::memory_order_acquire) == seen; turns++) {
            relax();
            if (turns % 64 || std::chrono::steady_clock::now() < end) continue;
            asleep_.fetch_add(1);
            while (published_.load() == seen) futex(FUTEX_WAIT_PRIVATE, seen);
            asleep_.fetch_sub(1);
        }
    }

    void futex(int operation, uint32_t value) {
        syscall(SYS_futex, &published_, operation, value, nullptr, nullptr, 0);
    }

    const int threads_;
    std::atomic<bool> busy_{false};
    // Number of the current work in the upper half, its next piece in the lower half.
    alignas(64) std::atomic<uint64_t> ticket_{CLOSED};
    std::atomic<Call> call_{nullptr};
    std::atomic<void*> work_{nullptr};
    std::atomic<int64_t> count_{0};
    alignas(64) std::atomic<int64_t> done_{0};  // finished pieces of the current work
    alignas(64) std::atomic<uint32_t> published_{0};
    std::atomic<int> asleep_{0};
};

namespace {

// Calls work(i) for every i below `count`. All calls together read `bytes` bytes.
template <class Work>
void each(int64_t count, int64_t bytes, Team* team, Work work) {
    int64_t step = std::max<int64_t>(1, count / (PIECES * team->threads()));
    if (bytes < SMALL) step = std::max<int64_t>(1, count);
    auto piece = [&](int64_t number) {
        int64_t end = std::min(count, (number + 1) * step);
        for (int64_t i = number * step; i < end; i++) work(i);
    };
    team->share((count + step - 1) / step, piece);
}

}  // namespace
