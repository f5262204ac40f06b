#pragma once
// INGOT_HD marks functions shared by host and device code.
#ifdef __CUDACC__
#define INGOT_HD __host__ __device__
#else
#define INGOT_HD
#endif
