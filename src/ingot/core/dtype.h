#pragma once
// Element types, and conversions between the 16-bit floating types and float (round to nearest, ties to even).
#include <bit>
#include <cstdint>
#include <ostream>
#include <string_view>
#include <type_traits>

#include "ingot/core/check.h"
#include "ingot/core/hd.h"

namespace ingot {

enum class DType : uint8_t { f64, f32, bf16, f16, i64, i32, u32, u16, u8 };

struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  INGOT_HD explicit bf16(float x) {
    const uint32_t u = std::bit_cast<uint32_t>(x);
    const bool nan = (u & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? uint16_t((u >> 16) | 0x40) : uint16_t((u + 0x7fffu + ((u >> 16) & 1)) >> 16);
  }
  INGOT_HD operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }
};

struct f16 {
  uint16_t bits = 0;
  f16() = default;
  INGOT_HD explicit f16(float x);
  INGOT_HD operator float() const;
};

INGOT_HD inline f16::f16(float x) {
  const uint32_t u = std::bit_cast<uint32_t>(x), sign = (u >> 16) & 0x8000u, mag = u & 0x7fffffffu;
  if (mag > 0x7f800000u) {  // NaN stays a quiet NaN
    bits = uint16_t(sign | 0x7e00u);
  } else if (mag >= 0x477ff000u) {  // 65520 and above round to infinity
    bits = uint16_t(sign | 0x7c00u);
  } else if (mag < 0x38800000u) {  // below 2^-14: adding 0.5 lines the mantissa up with the subnormal grid
    const float shifted = std::bit_cast<float>(mag) + 0.5f;
    bits = uint16_t(sign | (std::bit_cast<uint32_t>(shifted) - 0x3f000000u));
  } else {
    bits = uint16_t(sign | ((mag + 0xfffu + ((mag >> 13) & 1) - 0x38000000u) >> 13));
  }
}

INGOT_HD inline f16::operator float() const {
  const uint32_t sign = uint32_t(bits & 0x8000u) << 16, mag = bits & 0x7fffu;
  if (mag >= 0x7c00u) return std::bit_cast<float>(sign | 0x7f800000u | ((mag & 0x3ffu) << 13));
  if (mag >= 0x400u) return std::bit_cast<float>(sign | ((mag << 13) + 0x38000000u));
  const float value = float(mag) * 0x1p-24f;  // subnormal: exact product
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
}

constexpr int64_t size_of(DType t) {
  switch (t) {
    case DType::f64:
    case DType::i64: return 8;
    case DType::f32:
    case DType::i32:
    case DType::u32: return 4;
    case DType::bf16:
    case DType::f16:
    case DType::u16: return 2;
    case DType::u8: return 1;
  }
  return 0;
}
constexpr std::string_view name_of(DType t) {
  switch (t) {
    case DType::f64: return "f64";
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f16: return "f16";
    case DType::i64: return "i64";
    case DType::i32: return "i32";
    case DType::u32: return "u32";
    case DType::u16: return "u16";
    case DType::u8: return "u8";
  }
  return "?";
}
inline std::ostream& operator<<(std::ostream& out, DType t) { return out << name_of(t); }

template <class T> struct dtype_of_t;
template <> struct dtype_of_t<double> { static constexpr DType value = DType::f64; };
template <> struct dtype_of_t<float> { static constexpr DType value = DType::f32; };
template <> struct dtype_of_t<bf16> { static constexpr DType value = DType::bf16; };
template <> struct dtype_of_t<f16> { static constexpr DType value = DType::f16; };
template <> struct dtype_of_t<int64_t> { static constexpr DType value = DType::i64; };
template <> struct dtype_of_t<int32_t> { static constexpr DType value = DType::i32; };
template <> struct dtype_of_t<uint32_t> { static constexpr DType value = DType::u32; };
template <> struct dtype_of_t<uint16_t> { static constexpr DType value = DType::u16; };
template <> struct dtype_of_t<uint8_t> { static constexpr DType value = DType::u8; };
template <class T> inline constexpr DType dtype_of = dtype_of_t<std::remove_const_t<T>>::value;

// The type sums are kept in: double for double, float for everything narrower.
template <class T> using accum_t = std::conditional_t<std::is_same_v<T, double>, double, float>;

// Calls use(T{}) with the floating type `t` names.
template <class Use> decltype(auto) with_float_type(DType t, const char* op, Use&& use) {
  switch (t) {
    case DType::f64: return use(double{});
    case DType::f32: return use(float{});
    case DType::bf16: return use(bf16{});
    case DType::f16: return use(f16{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, ", expected f64, f32, bf16 or f16");
  }
}
// The same for the two types the CPU trains in.
template <class Use> decltype(auto) with_wide_float_type(DType t, const char* op, Use&& use) {
  switch (t) {
    case DType::f64: return use(double{});
    case DType::f32: return use(float{});
    default: fail(ErrorCode::unsupported, op, ": found dtype ", t, ", expected f64 or f32");
  }
}

}  // namespace ingot
