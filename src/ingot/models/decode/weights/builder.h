#pragma once
// Places the weights and all other parts of a model in a GPU's memory: a first walk over the parts counts their bytes,
// and a second walk places and fills them.
#include <memory>
#include <vector>

#include "ingot/models/decode/model/state.h"
#include "ingot/models/decode/weights/slices.h"
#include "ingot/models/decode/weights/upload.h"
#include "ingot/models/decoder_weights.h"

namespace ingot::decode {

// Weights of the config's shapes without memory, which describe a synthetic model.
DecoderWeights shapes_of(const DecoderSpec& config, WeightFormat dense, WeightFormat experts);

// Gives every part of a model its place in `memory` and fills the part from the host, or with random numbers where a
// seed is given. Without memory the builder only counts bytes.
class DeviceBuilder {
 public:
  int64_t bytes = 0;

  DeviceBuilder(char* memory, const uint64_t* seed, Stream stream, int device)
      : memory_(memory), seed_(seed), stream_(stream), device_(device) {}

  template <class T> void take(T*& p, int64_t n) {
    p = reinterpret_cast<T*>(memory_ + bytes);
    bytes += (n * int64_t(sizeof(T)) + 255) / 256 * 256;
  }
  // With `cut`, only the elements of the vector that belong to the rows of the cut.
  void vector(const float*& p, const Tensor& from, double scale, double mean = 0, const Cut* cut = nullptr);
  // n times the same number.
  void constant(const float*& p, int64_t n, float value);
  void embedding(const bf16*& p, const WeightMatrix& from);
  void matrix(Matrix& m, const WeightMatrix& from, double scale);
  void matrix(Matrix& m, const WeightMatrix& from, double scale, const Cut& cut);

 private:
  void fill(const WeightMatrix& device, const Matrix& m, const WeightMatrix& from, double scale, const Cut& cut);
  uint64_t next_seed() { return *seed_ * 65536 + next_++; }
  Uploader& uploader();
  // Uploads `cut` of a matrix, or of each matrix of a bank, some row tiles at a time.
  void upload_cuts(const WeightMatrix& from, const Cut& cut, uint8_t* to, int64_t matrix_bytes);
  void upload_cut(const WeightMatrix& from, const Cut& cut, uint8_t* to);
  void upload_rows(const WeightMatrix& from, const Cut& cut, uint8_t* to, WeightFormat f);

  char* memory_;
  const uint64_t* seed_;
  Stream stream_;
  uint64_t next_ = 0;
  std::vector<char> packed_;
  std::vector<uint8_t> cut_;
  int device_;
  std::unique_ptr<Uploader> uploader_;
};

// Places and fills the part of all weights that belongs to the slice.
void build_weights(DeviceBuilder& builder, const DecoderSpec& config, const DecoderWeights& weights, const Slice& slice,
                   Model& model);

// Fills weight tiles with random numbers of standard deviation `scale`, and the row scales of fp8 as well.
void fill_weight_tiles(const WeightMatrix& w, double scale, uint64_t seed, Stream stream);
void fill_normal(void* to, DType dtype, int64_t n, double scale, double mean, uint64_t seed, Stream stream);
// Applies to_device_order() to weight tiles in a GPU's memory.
void order_for_device(const WeightMatrix& w, Stream stream);

}  // namespace ingot::decode
