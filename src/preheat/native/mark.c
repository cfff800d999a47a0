/* The hash of the sources of this library, which Python code looks for: see `native_build.py`. */
#ifndef PREHEAT_SOURCES
#error "build it by: python hatch_build.py"
#endif

const char preheat_sources[] __attribute__((used)) = "preheat sources " PREHEAT_SOURCES;
