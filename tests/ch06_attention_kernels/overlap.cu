// Step 5, which also counts for each thread the tiles that it attends to while a copy of its own is under way. For the
// emulator: it alone knows which groups nobody has waited for yet.

#include "rows.cuh"

static float overlapped[THREADS];

template <class ReadK, class ReadV>
void attend_rows_and_count(Lane& lane, const ReadK& k, const ReadV& v, int exist, float scale) {
    overlapped[threadIdx.x] += emulator::current->groups.size() > 1;  // the last one is still open
    attend_rows(lane, k, v, exist, scale);
}

#define attend_rows attend_rows_and_count
#include "decode_5_async.cu"
#undef attend_rows

// One sequence, one KV head. The counts go to a.partials.
extern "C" __global__ void overlap(const Args a) {
    overlapped[threadIdx.x] = 0;
    decode(a);
    a.partials[threadIdx.x] = overlapped[threadIdx.x];
}
