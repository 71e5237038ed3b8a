// CUDA's short vectors, aligned as on the device, so that UBSan sees a misaligned vector access.
#pragma once

// NOLINTBEGIN(bugprone-macro-parentheses): the arguments are types
#define MMREC_VECTOR1TO4(name, T)                                              \
  struct name##1 {                                                             \
    T x;                                                                       \
  };                                                                           \
  struct alignas(2 * sizeof(T)) name##2 {                                      \
    T x, y;                                                                    \
  };                                                                           \
  struct name##3 {                                                             \
    T x, y, z;                                                                 \
  };                                                                           \
  struct alignas(sizeof(T) == 8 ? 16 : 4 * sizeof(T)) name##4 {                \
    T x, y, z, w;                                                              \
  };                                                                           \
  inline constexpr name##1 make_##name##1(T x) { return {x}; }                 \
  inline constexpr name##2 make_##name##2(T x, T y) { return {x, y}; }         \
  inline constexpr name##3 make_##name##3(T x, T y, T z) { return {x, y, z}; } \
  inline constexpr name##4 make_##name##4(T x, T y, T z, T w) { return {x, y, z, w}; }

MMREC_VECTOR1TO4(char, signed char)
MMREC_VECTOR1TO4(uchar, unsigned char)
MMREC_VECTOR1TO4(short, short)
MMREC_VECTOR1TO4(ushort, unsigned short)
MMREC_VECTOR1TO4(int, int)
MMREC_VECTOR1TO4(uint, unsigned)
MMREC_VECTOR1TO4(longlong, long long)
MMREC_VECTOR1TO4(ulonglong, unsigned long long)
MMREC_VECTOR1TO4(float, float)
MMREC_VECTOR1TO4(double, double)
#undef MMREC_VECTOR1TO4
// NOLINTEND(bugprone-macro-parentheses)

struct dim3 {
  unsigned x, y, z;
  constexpr dim3(unsigned a = 1, unsigned b = 1, unsigned c = 1) : x(a), y(b), z(c) {}
  constexpr dim3(uint3 v) : x(v.x), y(v.y), z(v.z) {}
};
