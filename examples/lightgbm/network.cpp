// LightGBM's two network functions on kolo. train.py gives their addresses to
// LGBM_NetworkInitWithFunctions.
//
//   g++ -O2 -shared -fPIC network.cpp $(pkg-config --cflags --libs kolo) -o libkolo_lightgbm.so
//
// LightGBM's functions return nothing. If a collective fails, they throw: LightGBM calls them
// outside its parallel regions, and its C API turns every exception into an error, in Python a
// LightGBMError.
#include <kolo.h>

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>
#include <vector>

namespace {

// As LightGBM's meta.h declares it: it adds `bytes` bytes of elements of `type_size` bytes to
// `output`, or merges them in another way.
using Reducer = void (*)(const char *input, char *output, int type_size, int32_t bytes);

// LightGBM copies an error to 512 bytes.
constexpr size_t kLongestMessage = 500;

kolo_comm_t communicator = nullptr;
int32_t own_rank = 0;
int32_t world_size = 1;
// Why the last call failed.
std::string message;
// One block from each rank.
std::vector<char> received;

kolo_result_t keep_message(kolo_result_t result) {
  if (result != KOLO_OK) {
    kolo_error_t error = KOLO_ERROR_INITIALIZER;
    kolo_last_error(nullptr, &error);
    message = error.code == KOLO_OK ? kolo_error_string(result) : error.message;
  }
  return result;
}

void check(kolo_result_t result) {
  if (keep_message(result) != KOLO_OK) {
    throw std::runtime_error(("kolo: " + message).substr(0, kLongestMessage));
  }
}

// Returns the lengths of the blocks. LightGBM's blocks follow each other in rank order, as kolo's
// do; if a future version has others, this throws.
std::vector<size_t> counts_of(const int32_t *start, const int32_t *length, int blocks) {
  bool consecutive = blocks == world_size;
  for (int i = 0; consecutive && i < blocks; ++i) {
    consecutive = start[i] == (i == 0 ? 0 : start[i - 1] + length[i - 1]);
  }
  if (!consecutive) throw std::runtime_error("kolo: LightGBM's blocks are not consecutive");
  return std::vector<size_t>(length, length + blocks);
}

// Reduces the blocks in `received`, of `bytes` bytes each, into the first, in the order of
// LightGBM's recursive halving, so that sums have the same bits as on LightGBM's sockets.
void reduce(int32_t bytes, int type_size, Reducer reducer) {
  auto block = [bytes](int i) { return received.data() + static_cast<size_t>(i) * bytes; };
  int groups = 1;
  while (2 * groups <= world_size) groups *= 2;
  // Unless the world size is a power of two, the last ranks form groups of two.
  const int singles = 2 * groups - world_size;
  std::vector<int> leaders;
  for (int i = 0; i < groups; ++i) leaders.push_back(i <= singles ? i : 2 * i - singles);
  for (int i = singles; i < groups; ++i) {
    reducer(block(leaders[i] + 1), block(leaders[i]), type_size, bytes);
  }
  for (int distance = groups / 2; distance > 0; distance /= 2) {
    for (int i = 0; i < distance; ++i) {
      reducer(block(leaders[i + distance]), block(leaders[i]), type_size, bytes);
    }
  }
}

}  // namespace

extern "C" {

// Connects with the ranks of the launcher and stores this rank and the world size.
kolo_result_t kolo_lightgbm_start(int32_t *rank, int32_t *nranks) {
  kolo_result_t result = keep_message(kolo_comm_init_env(&communicator, nullptr));
  if (result == KOLO_OK) result = keep_message(kolo_comm_rank(communicator, &own_rank));
  if (result == KOLO_OK) result = keep_message(kolo_comm_count(communicator, &world_size));
  *rank = own_rank;
  *nranks = world_size;
  return result;
}

// Waits for all ranks.
kolo_result_t kolo_lightgbm_barrier(void) { return keep_message(kolo_barrier(communicator, nullptr)); }

kolo_result_t kolo_lightgbm_stop(void) { return keep_message(kolo_comm_destroy(communicator)); }

// Returns why the last call failed. The text is valid until the next call.
const char *kolo_lightgbm_error(void) { return message.c_str(); }

// LightGBM's AllgatherFunction: writes block i of rank i to `output` on all ranks.
void kolo_lightgbm_all_gather(char *input, int32_t input_size, const int32_t *start, const int32_t *length, int blocks,
                              char *output, int32_t) {
  const std::vector<size_t> counts = counts_of(start, length, blocks);
  // `input` may be at the start of `output`. kolo accepts it in this rank's block only.
  char *own = output + start[own_rank];
  std::memmove(own, input, input_size);
  check(kolo_all_gather_v(own, output, counts.data(), KOLO_UINT8, communicator, nullptr));
}

// LightGBM's ReduceScatterFunction: reduces block i of all ranks and writes it to `output` of rank
// i. Only LightGBM knows the type of the elements, so the ranks exchange blocks, and LightGBM's
// `reducer` reduces them.
void kolo_lightgbm_reduce_scatter(char *input, int32_t, int type_size, const int32_t *start, const int32_t *length,
                                  int blocks, char *output, int32_t, const Reducer &reducer) {
  const std::vector<size_t> counts = counts_of(start, length, blocks);
  const size_t own = counts[own_rank];
  const std::vector<size_t> from_each(blocks, own);
  received.resize(std::max(received.size(), own * blocks));
  check(kolo_all_to_all_v(input, counts.data(), received.data(), from_each.data(), KOLO_UINT8, communicator, nullptr));
  reduce(length[own_rank], type_size, reducer);
  std::memcpy(output, received.data(), own);
}

}  // extern "C"
