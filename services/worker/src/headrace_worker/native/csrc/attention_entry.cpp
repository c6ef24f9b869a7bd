#include "attention.h"
#include "numeric.h"

using namespace headrace;

namespace {

template <class T>
void run(const AttentionShape& shape, const Sequences& sequences, const void* queries, std::int64_t query_stride,
         const void* pages, void* output, int num_threads) {
    AttentionPlan plan;
    plan_attention(shape, sequences, num_threads, plan);
    std::vector<float> partials(static_cast<std::size_t>(partials_size(shape, plan)));
    std::atomic<int> next[2] = {0, 0};
    auto body = [&](Team& team) {
        attend(team, shape, sequences, plan, static_cast<const T*>(queries), query_stride, static_cast<const T*>(pages),
               static_cast<T*>(output), shape.num_heads * shape.head_dim, partials.data(), next);
    };
    run_team(num_threads, body);
}

}  // namespace

HEADRACE_EXPORT void headrace_attention(const AttentionShape* shape, const Sequences* sequences, const void* queries,
                                   std::int64_t query_stride, const void* pages, void* output, int is_bf16,
                                   int num_threads) {
    if (is_bf16)
        run<bf16>(*shape, *sequences, queries, query_stride, pages, output, num_threads);
    else
        run<float>(*shape, *sequences, queries, query_stride, pages, output, num_threads);
}
