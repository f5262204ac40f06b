// The CUDA kernels of embeddings on the CPU, where sanitizers see their accesses.
#include "ingot/kernels/embedding/embedding_cases.test.h"

namespace ingot {
namespace cuda {
void embedding(const Embedding& a, Stream stream);
void embedding_backward(const EmbeddingBackward& a, Stream stream);
}  // namespace cuda
namespace {

TEST(EmbeddingEmulated, CopiesRowsAndAddsTheirGradients) {
  embedding_cases::rows_are_copied_or_added<testing::Buffer>([](const Embedding& a) { cuda::embedding(a, {}); });
  embedding_cases::gradients_are_added_to_their_rows<testing::Buffer>(
      [](const EmbeddingBackward& a) { cuda::embedding_backward(a, {}); });
}

}  // namespace
}  // namespace ingot
