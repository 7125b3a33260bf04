# Cross-compiles for macOS 11 on Apple silicon with zig (PyPI: ziglang), which brings clang and the headers:
#   ZIG=.../zig cmake -DCMAKE_TOOLCHAIN_FILE=cmake/aarch64-macos.cmake ...
set(CMAKE_SYSTEM_NAME Darwin)
set(CMAKE_SYSTEM_PROCESSOR arm64)
set(CMAKE_CXX_COMPILER ${CMAKE_CURRENT_LIST_DIR}/zig-c++-macos)
set(CMAKE_OSX_SYSROOT "")
set(CMAKE_OSX_DEPLOYMENT_TARGET "")
# Told, not asked: CMake would link a program to find out, for which zig first builds a C++ library (90 s).
set(CMAKE_CXX_COMPILER_ID_RUN 1)
set(CMAKE_CXX_COMPILER_ID Clang)
set(CMAKE_CXX_COMPILER_VERSION 22)
set(CMAKE_CXX_STANDARD_COMPUTED_DEFAULT 17)
set(CMAKE_TRY_COMPILE_TARGET_TYPE STATIC_LIBRARY)
