#pragma once
// The configuration of an EAGLE-3 draft head, as published: config.json beside safetensors, in the spellings of
// ModelOpt, SpecForge and speculators. spec/eagle.py defines what a head computes.
#include <optional>
#include <string>
#include <vector>

#include "ingot/kernels/quant/quant.h"
#include "ingot/models/spec.h"

namespace ingot::draft {

struct HeadOptions {
  // The boundaries that the head reads, in place of those of its files. Boundary b is the target's hidden state behind
  // its first b layers. In some published files the ids are boundaries; in others they are numbers of layers whose
  // output is meant, which are one less than the boundary. Only the measured acceptance shows which is right.
  std::vector<int64_t> layers;
  int64_t window = 0;  // visible keys of the head's attention; 0: all
  // The format of the head's own matrices in memory, the embedding excepted: bf16, fp8 or mxfp4. None: as stored.
  std::optional<WeightFormat> format;
};

struct HeadConfig {
  int64_t hidden = 0, heads = 0, kv_heads = 0, head_dim = 0, intermediate = 0;
  int64_t vocab = 0, draft_vocab = 0;  // ids of the target; ids that the head can guess
  double norm_eps = 1e-5;
  RopeTable rope;
  std::vector<int64_t> boundaries;    // of the target, in the order of fc's columns
  bool norm_before_fc = false;        // one norm over all boundaries
  bool fc_norm = false;               // a norm for each boundary
  bool norm_before_residual = false;  // the residual stream starts with the normalised features
  bool norm_output = false;           // the next guess starts from the final norm's output
  int64_t window = 0;                 // as HeadOptions

  int64_t q_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  int64_t features() const { return int64_t(boundaries.size()) * hidden; }
};

// Reads `directory`/config.json of a head for this target, of which the first `target_layers` layers run. All problems
// are in one Error{bad_data}, each with its key.
HeadConfig read_head_config(const std::string& directory, const DecoderSpec& target, int64_t target_layers,
                            const HeadOptions& options = {});

}  // namespace ingot::draft
