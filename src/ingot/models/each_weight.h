#pragma once
// Sums over all weights of a model.
#include "ingot/models/decoder_weights.h"

namespace ingot {

// Calls of_matrix(WeightMatrix) or of_vector(Tensor) once for each weight that the model has. A head that is the
// embedding is not a weight of its own.
template <class OfMatrix, class OfVector>
void for_each_weight(const DecoderWeights& w, bool tied_embeddings, OfMatrix&& of_matrix, OfVector&& of_vector) {
  const auto matrix = [&](const WeightMatrix& m) {
    if (m) of_matrix(m);
  };
  const auto vector = [&](const Tensor& t) {
    if (t) of_vector(t);
  };
  matrix(w.embed), vector(w.norm);
  if (!tied_embeddings) matrix(w.head);
  for (const DecoderLayer& l : w.layers) {
    for (const WeightMatrix* m : {&l.qkv, &l.o, &l.router, &l.gate_up, &l.down}) matrix(*m);
    for (const Tensor* t : {&l.attn_norm, &l.mlp_norm, &l.b_qkv, &l.b_o, &l.b_router, &l.sinks, &l.b_gate_up, &l.b_down,
                            &l.attn_post_norm, &l.mlp_post_norm, &l.q_norm, &l.k_norm})
      vector(*t);
  }
}

// The bytes of all weights, whether they are in memory or only shapes.
inline int64_t bytes_of_weights(const DecoderWeights& w, bool tied_embeddings) {
  int64_t bytes = 0;
  for_each_weight(
      w, tied_embeddings, [&](const WeightMatrix& m) { bytes += m.data.bytes() + (m.scales ? m.scales.bytes() : 0); },
      [&](const Tensor& t) { bytes += t.bytes(); });
  return bytes;
}

}  // namespace ingot
