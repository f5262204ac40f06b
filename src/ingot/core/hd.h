#pragma once
// INGOT_HD marks a function that host and device code share.
#ifdef __CUDACC__
#define INGOT_HD __host__ __device__
#else
#define INGOT_HD
#endif
