"""Loads PTX, which the driver compiles, and prints the result of the load."""

import sys

from cuda.bindings import driver

PTX = b"""
.version 8.0
.target sm_80
.address_size 64
.visible .entry twice(.param .u64 x) {
    .reg .b64 %rd<3>; .reg .f32 %f<3>; .reg .b32 %r<2>;
    ld.param.u64 %rd1, [x];
    cvta.to.global.u64 %rd2, %rd1;
    ld.global.f32 %f1, [%rd2];
    add.f32 %f2, %f1, %f1;
    st.global.f32 [%rd2], %f2;
    ret;
}
"""


def check(result):
    code, *values = result
    if int(code):
        print(int(code))
        sys.exit(0)
    return values[0] if values else None


check(driver.cuInit(0))
context = check(driver.cuDevicePrimaryCtxRetain(0))
check(driver.cuCtxSetCurrent(context))
check(driver.cuModuleLoadData(PTX + b"\0"))
print(0)
