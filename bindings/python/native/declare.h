#pragma once
// Ops with a list as their call from Python: the arguments in order, each with its member of the op's struct. declare()
// makes the module's function from this list: the function reads the arguments, takes the workspace from PyTorch's
// allocator, and runs the op on PyTorch's stream without the interpreter's lock. In a build without the op's room the
// function refuses by the room's name. declared.cpp has the lists.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>

#include <cctype>
#include <string>
#include <type_traits>
#include <typeinfo>

#include "ingot/core/check.h"
#include "ingot/core/dispatch.h"
#include "tensors.h"

namespace ingot::python {

// The value if the room is part of the build, else null. If it is null, no code refers to the room's functions.
#define INGOT_BUILT(ROOM, ...)                                    \
  [] {                                                            \
    if constexpr (INGOT_DETAIL_IS_ONE(INGOT_WITHOUT_##ROOM) == 0) \
      return __VA_ARGS__;                                         \
    else                                                          \
      return nullptr;                                             \
  }()

// A tensor, or None if the member is empty. The member may be one of a base class of the op's struct: a call whose
// arguments are not the members of one struct has a struct of its own, which derives from the op's (gate_arguments.h).
template <class Op> struct Operand {
  const char* name;
  Tensor Op::*member;
  Tensor (*view)(const char* op, const char* name, nb::handle tensor);
};
template <class Op> Operand<Op> rows(const char* name, Tensor Op::*m) { return {name, m, &matrix}; }  // (T, C)
inline Tensor rows_of_heads(const char* op, const char* name, nb::handle t) { return view(op, name, t, 3); }
template <class Op> Operand<Op> split_rows(const char* name, Tensor Op::*m) {  // (T, C), or (T, H, C) of two strides
  return {name, m, &rows_of_heads};
}
template <class Op> Operand<Op> numbers(const char* name, Tensor Op::*m) { return {name, m, &vector}; }  // all elements
template <class Op> Operand<Op> heads(const char* name, Tensor Op::*m) { return {name, m, &heads}; }     // (T, H, D)
template <class Op> Operand<Op> bank(const char* name, Tensor Op::*m) { return {name, m, &bank}; }       // (B, R, C)

// A number, a truth value, or the number of an enumerator up to `last`.
template <class Op, class T> struct Option {
  const char* name;
  T Op::*member;
  int last;
};
template <class Op, class T> Option<Op, T> option(const char* name, T Op::*m) { return {name, m, 0}; }
template <class Op, class T> Option<Op, T> choice(const char* name, T Op::*m, int last) { return {name, m, last}; }

// A Python object that the op's `complete` reads.
template <class Op> struct PythonObject { nb::object Op::*member; };
template <class Op> PythonObject<Op> object(nb::object Op::*m) { return {m}; }

template <class Op, class Part> void read(const char* op, const Operand<Part>& o, nb::handle given, Op& a) {
  a.*o.member = o.view(op, o.name, given);
}
template <class Op, class Part> void read(const char*, const PythonObject<Part>& o, nb::handle given, Op& a) {
  a.*o.member = nb::borrow(given);
}
template <class Op, class Part, class T> void read(const char* op, const Option<Part, T>& o, nb::handle given, Op& a) {
  if constexpr (std::is_enum_v<T>) {
    const int value = nb::cast<int>(given);
    INGOT_CHECK(value >= 0 && value <= o.last, op, ": ", o.name, ": found ", value, ", expected 0 to ", o.last);
    a.*o.member = T(value);
  } else {
    try {
      a.*o.member = nb::cast<T>(given);
    } catch (const std::bad_cast&) {
      fail(ErrorCode::invalid_argument, op, ": ", o.name, ": found ",
           nb::cast<std::string>(nb::str(given.type().attr("__name__"))), ", expected a ",
           std::is_same_v<T, bool> ? "truth value" : "number");
    }
  }
}

template <class Op> struct Native {
  const char* room;                                 // in capitals, as in INGOT_BUILT
  void (*run)(const Op&, Stream);                   // null in a build without the room
  int64_t (*workspace_bytes)(const Op&) = nullptr;  // null: the op needs none
  // Called with the name of the op after the arguments have been read: fills the members that depend on several
  // arguments. False: there is nothing to compute.
  bool (*complete)(const char* op, Op& a) = nullptr;
};

[[noreturn]] inline void refuse_left_out(std::string room) {
  for (char& c : room) c = char(std::tolower(c));
  fail(ErrorCode::unsupported, room, ": found a build without it, expected one whose INGOT_ROOMS names it or is empty");
}

// The first argument determines the op's device and stream.
template <class Op, class Part, class... Rest>
void declare(nb::module_& m, const char* name, Native<Op> op, Operand<Part> first, Rest... rest) {
  m.def(name, [=](nb::args given) {
    if (op.run == nullptr) refuse_left_out(op.room);
    constexpr size_t kArguments = 1 + sizeof...(rest);
    INGOT_CHECK(given.size() == kArguments, name, ": found ", given.size(), " arguments, expected ", kArguments);
    Op a{};
    read(name, first, given[0], a);
    floats(name, first.name, a.*first.member);
    size_t i = 0;
    (read(name, rest, nb::object(given[++i]), a), ...);
    const Tensor x = a.*first.member;
    if (op.complete != nullptr && !op.complete(name, a)) return;
    nb::object workspace;
    if constexpr (requires { a.workspace; })
      if (op.workspace_bytes != nullptr)
        if (const int64_t bytes = op.workspace_bytes(a))
          workspace = empty_vector(nb::object(given[0]), x.device, DType::u8, bytes, a.workspace);
    const Stream stream = stream_of(x);
    unlocked([&] { op.run(a, stream); });
  });
}

void declare_ops(nb::module_& m);

}  // namespace ingot::python
