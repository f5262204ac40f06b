#include "ingot/kernels/embedding/embedding_cases.test.h"
#include "ingot/testing/device_buffer.h"
#include "ingot/testing/gpu_test.h"

namespace ingot {
namespace {

class EmbeddingCuda : public testing::GpuTest<> {};

TEST_F(EmbeddingCuda, CopiesRowsAndAddsTheirGradientsSmall) {
  embedding_cases::rows_are_copied_or_added<testing::DeviceBuffer>([](const Embedding& a) { embedding(a, {}); });
  embedding_cases::gradients_are_added_to_their_rows<testing::DeviceBuffer>(
      [](const EmbeddingBackward& a) { embedding_backward(a, {}); });
}

}  // namespace
}  // namespace ingot
