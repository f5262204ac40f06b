#pragma once
// The stages between the products that GPT-OSS does not have: a scale of embeddings, norms of queries and keys, norms
// of the outputs of attention and MLP, a softcap of logits. Each function launches a kernel.
#include "ingot/models/decode/phased/stages.h"

namespace ingot::decode {

// Embeddings times `scale`, and the list that makes the dense MLP a single expert, chosen by all T tokens.
struct ScaledEmbedding {
  Embedding embedding;
  float scale;
  routing::Lists dense;  // without a count: no list is written
};
void embed_scaled(const ScaledEmbedding& p, Stream stream);

// Heads of queries and keys, in place: x = x weight / rms(x).
struct HeadNorm {
  float* qkv;                // (T, (heads + 2 kv_heads) dim)
  const float *query, *key;  // (dim)
  uint32_t T, heads, kv_heads, dim;
  float eps;
};
void normalise_heads(const HeadNorm& p, Stream stream);

// x += y weight / rms(y), row by row.
struct BranchNorm {
  float* x;
  const float* y;
  int64_t stride;  // of both
  const float* weight;
  uint32_t T, C;
  float eps;
};
void add_normed_branch(const BranchNorm& p, Stream stream);

// x = cap tanh(x / cap)
struct CappedLogits {
  float* x;
  int64_t n;
  float cap;
};
void cap_logits(const CappedLogits& p, Stream stream);

}  // namespace ingot::decode
