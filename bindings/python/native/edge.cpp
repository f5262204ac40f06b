#include "edge.h"

#include <unordered_set>
#include <utility>

#include "tensors.h"

namespace ingot::python {
namespace {

PyObject* make_ = nullptr;
// All edges; the interpreter's lock guards the set. The set is never destroyed, because modules may outlive static
// objects.
std::unordered_set<Edge*>& edges() {
  static auto* all = new std::unordered_set<Edge*>;
  return *all;
}

template <class F> void for_each_parameter(const std::vector<MlpLayer>& layers, F&& f) {
  for (const MlpLayer& layer : layers)
    for (const Tensor* t : {&layer.w, &layer.b, &layer.g})
      if (*t) f(*t);
}

}  // namespace

Edge::Edge() { edges().insert(this); }
Edge::~Edge() { edges().erase(this); }

void Edge::forget() {
  parts_.clear();
  const nb::object tensor = std::move(tensor_);  // its release may run code with a use of this edge
}

nb::object Edge::of(const std::vector<nb::object>& parameters, const std::vector<MlpLayer>& layers, Stream stream) {
  if (make_ == nullptr) return {};
  if (!all_wanted_leaves(parameters)) return forget(), nb::object();
  size_t i = 0;
  bool same = parts_.size() == parameters.size() && stream_.handle == stream.handle;
  for_each_parameter(layers, [&](const Tensor& t) {
    same = same && parts_[i] == Part{implementation(parameters[i]), t.data, t.dtype, t.device, t.shape};
    ++i;
  });
  if (same && tensor_.is_valid()) return tensor_;
  if (!same) {
    forget();
    i = 0;
    for_each_parameter(layers, [&](const Tensor& t) {
      parts_.push_back({implementation(parameters[i++]), t.data, t.dtype, t.device, t.shape});
    });
    stream_ = stream;
    return {};
  }
  std::vector<Part> parts = parts_;
  nb::object arguments = nb::steal(PyTuple_New(Py_ssize_t(parameters.size())));
  for (i = 0; i < parameters.size(); ++i)
    PyTuple_SET_ITEM(arguments.ptr(), Py_ssize_t(i), nb::object(parameters[i]).release().ptr());
  nb::object made = nb::steal(PyObject_CallObject(make_, arguments.ptr()));
  if (!made.is_valid()) {  // the call continues without an edge, unless the error is an interrupt
    nb::python_error error;
    if (!error.matches(PyExc_Exception)) throw error;
    return forget(), nb::object();
  }
  if (made.is_none()) return {};
  forget();  // another thread may have made a tensor in the meantime
  parts_ = std::move(parts);
  stream_ = stream;
  tensor_ = made;
  return made;
}

void attach_edges(nb::handle make) { make_ = make.inc_ref().ptr(); }

// Python 3.14 collects all objects step by step; the number 1 means one such step. Only an explicit request collects
// all objects at once.
constexpr int kOldest = PY_VERSION_HEX < 0x030e0000 ? 2 : 1;

void forget_edges(nb::handle phase, nb::dict info) {
  if (!phase.equal(nb::str("start")) || nb::cast<int>(info["generation"]) < kOldest) return;
  const std::vector<Edge*> all(edges().begin(), edges().end());
  for (Edge* edge : all)
    if (edges().contains(edge)) edge->forget();
}

}  // namespace ingot::python
