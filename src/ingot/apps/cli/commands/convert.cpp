// ingot convert: writes a checkpoint as one archive, which programs map into memory and read in place.
#include "ingot/apps/cli/framework/bar.h"
#include "ingot/apps/cli/framework/cli.h"
#include "ingot/apps/cli/shared/models.h"
#include "ingot/core/log.h"
#include "ingot/io/file.h"
#include "ingot/io/formats/archive.h"
#include "ingot/models/families/family.h"
#include "ingot/models/gpt_oss/archive.h"

namespace ingot::cli {
namespace {

struct ConvertCommand {
  std::string from, to, synthetic, dense, experts;
  bool verify = false;
};

void verify(const std::string& path) {
  if (exists(path) && !ArchiveFile::is_one(path))
    fail(ErrorCode::usage, path, ": found no archive to verify, expected one that `ingot convert` made");
  const ArchiveFile file(path);
  Bar bar("verifying");
  int64_t done = 0;
  file.verify([&](int64_t n) { bar.at(done += n, file.file_bytes()); });
  write_out(path + ": version " + std::to_string(kArchiveVersion) + ", " + with_commas(int64_t(file.entries().size())) +
            " blobs, " + format_bytes(double(file.file_bytes())) + ": every sum matches\n");
}

void report(const ConvertCommand& o, const std::string& to, const GptOssForms& forms, bool experts, int64_t bytes,
            double seconds) {
  write_out(to + ": " + format_bytes(double(bytes)) + ", dense " + name_of(forms.dense) +
            (experts ? std::string(", experts ") + name_of(forms.experts) : "") + ", in " + format_duration(seconds) +
            "\n");
  if (o.verify) verify(to);
}

// The formats that the options ask for; for the rest the default, or the formats of an archive.
GptOssForms forms_of(const ConvertCommand& o, const GptOssForms& default_forms) {
  GptOssForms forms = default_forms;
  if (!o.dense.empty()) forms.dense = archive_format_named(o.dense);
  if (!o.experts.empty()) forms.experts = archive_format_named(o.experts);
  return forms;
}
void log_second_rounding(const char* what, WeightFormat from, WeightFormat to) {
  const auto few = [](WeightFormat f) { return f == WeightFormat::fp8 || f == WeightFormat::mxfp4; };
  if (from != to && few(from) && few(to))
    log_info("the ", what, " weights are rounded a second time, from ", from, " to ", to,
             "; a conversion of the original checkpoint is more accurate");
}

// FROM describes the weights to write, so there is no file to read.
void make_up(const ConvertCommand& o) {
  if (!o.to.empty()) fail(ErrorCode::usage, "found --synthetic, FROM and OUT, expected --synthetic and OUT");
  Bar bar("making up");
  const GptOssForms forms = forms_of(o, {});
  const int64_t bytes = write_synthetic_gpt_oss(synthetic_gpt_oss(o.synthetic), o.from, 1,
                                                {forms, [&](int64_t done, int64_t all) { bar.at(done, all); }});
  report(o, o.from, forms, true, bytes, bar.seconds());
}

void convert(const ConvertCommand& o, const Command& c) {
  if (o.from.empty())
    fail(ErrorCode::usage, "found no ",
         o.synthetic.empty() ? "FROM, expected a checkpoint or an archive" : "OUT, expected the archive's name");
  if (!o.synthetic.empty()) return make_up(o);
  if (o.to.empty()) {
    if (!o.verify) fail(ErrorCode::usage, "found no OUT, expected the archive's name, or --verify to check FROM");
    return verify(o.from);
  }
  const bool family = is_family(o.from), archive = ArchiveFile::is_one(o.from);
  require_published(o.from);
  const bool experts = !family || archived_family(o.from).spec.experts > 0;
  if (!experts) c.refuse_given({"experts"}, "a model without experts");
  // Experts of GPT-OSS were published in mxfp4, those of the families in bf16.
  GptOssForms had{.experts = family ? WeightFormat::bf16 : WeightFormat::mxfp4};
  if (archive) had = family ? archive_forms(o.from, archived_family(o.from)) : gpt_oss_archive_forms(o.from);
  const GptOssForms forms = forms_of(o, had);
  if (archive) {
    log_second_rounding("dense", had.dense, forms.dense);
    log_second_rounding("experts'", had.experts, forms.experts);
  }
  Bar bar("converting");
  const ConvertOptions options = {forms, [&](int64_t done, int64_t all) { bar.at(done, all); }};
  const int64_t bytes = family ? convert_family(o.from, o.to, options) : convert_gpt_oss(o.from, o.to, options);
  report(o, o.to, forms, experts, bytes, bar.seconds());
}

}  // namespace

void add_convert(Command& root) {
  Command& c = root.add("convert", "Writes a published checkpoint as one archive that loads in seconds");
  auto o = std::make_shared<ConvertCommand>();
  c.text(
      "FROM", o->from,
      "a checkpoint's directory, a GGUF or an .iris file, or an archive, to convert to other formats or to --verify");
  c.text("OUT", o->to, "the archive, such as model.ingot");
  c.choice("--dense FORM", o->dense, {"bf16", "fp8", "mxfp4"},
           "format of attention, dense MLPs and the head: bf16, fp8 or mxfp4 (default: bf16, or that of the archive "
           "FROM); the embedding and the router stay bf16");
  c.choice("--experts FORM", o->experts, {"bf16", "fp8", "mxfp4"},
           "format of the experts: bf16, fp8 or mxfp4 (default: mxfp4 for GPT-OSS, bf16 for other models, or that of "
           "the archive FROM)");
  c.choice("--synthetic SHAPE", o->synthetic, {"20b", "120b", "small"},
           "in place of FROM: random weights in a published shape, 20b or 120b, or a small one, for benchmarks and "
           "load tests");
  c.flag("--verify", o->verify, "read the archive again and check the checksum of every blob");
  c.examples(R"(  ingot convert gpt-oss-20b gpt-oss-20b.ingot
  ingot convert gpt-oss-20b small.ingot --dense fp8 --verify
  ingot convert gpt-oss-20b-mxfp4.gguf gpt-oss-20b.ingot
  ingot convert gpt-oss-20b.ingot small.ingot --dense fp8
  ingot convert --verify gpt-oss-20b.ingot
  ingot convert --synthetic 20b random-20b.ingot
  ingot generate --model gpt-oss-20b.ingot --ids prompts.jsonl)");
  c.run([o, &c] {
    if (o->to.empty() && o->synthetic.empty()) c.refuse_given({"dense", "experts"}, "an archive that is only verified");
    convert(*o, c);
  });
}

}  // namespace ingot::cli
