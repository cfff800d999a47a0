"""C++ parameter types of compiled kernels, for every form of declaration."""

from __future__ import annotations

from collections.abc import Sequence
from unittest.mock import Mock

import pytest

from preheat.errors import CompileError, UnknownEntryError
from preheat.model import ptx
from preheat.model.arch import Arch
from preheat.model.artifact import EntryPoint
from preheat.model.events import Events
from preheat.model.program import Program
from preheat.toolchain import signature
from preheat.toolchain.compiler import Toolchain
from tests.conftest import Recorder
from tests.processes import TIMEOUT_SECONDS

SM_90 = Arch.parse("sm_90")


def entries(toolchain: Toolchain, source: str, names: Sequence[str] = ()) -> dict[str, EntryPoint]:
    """Return the kernels by their readable names."""
    compiled = toolchain.compile(Program.of(source, names=names), SM_90)
    return {e.title: e for e in compiled.entries}


def types(entry: EntryPoint) -> list[str | None]:
    return [p.type for p in entry.parameters]


# Types

TYPES = """
#include <cuda_fp16.h>
#include <cuda_bf16.h>
struct Plain { int a; float b[3]; };
namespace shapes { template <class T, int N> struct Box { T side[N]; }; }
enum Mode : char { fast };

HEAD scalars(bool a, char b, signed char c, unsigned char d, short e, unsigned short f, int g,
             unsigned h, long i, unsigned long j, long long k, unsigned long long l, float m,
             double n, Mode o, wchar_t p) {}
HEAD pointers(float* a, const float* b, float* const c, const float* __restrict__ d, float** e,
              const float* const* f, void* g, volatile int* h, int (*i)[4], float j[4]) {}
HEAD references(int& a, const float (&b)[4], const Plain& c) {}
HEAD values(Plain a, shapes::Box<double, 2> b, float4 c, int3 d, dim3 e, float2* f) {}
HEAD halves(__half a, __half2 b, __nv_bfloat16 c, const __nv_bfloat162* d) {}
HEAD functions(void (*a)(int, float*), int (*b)(int (*)(int)), float c) {}
HEAD alone() {}
"""
SPELLED = {
    "scalars": [
        "bool",
        "char",
        "signed char",
        "unsigned char",
        "short",
        "unsigned short",
        "int",
        "unsigned int",
        "long",
        "unsigned long",
        "long long",
        "unsigned long long",
        "float",
        "double",
        "Mode",
        "wchar_t",
    ],
    "pointers": [
        "float*",
        "float const*",
        "float*",
        "float const*",
        "float**",
        "float const* const*",
        "void*",
        "int volatile*",
        "int (*) [4]",
        "float*",
    ],
    "references": ["int&", "float const (&) [4]", "Plain const&"],
    "values": ["Plain", "shapes::Box<double, 2>", "float4", "int3", "dim3", "float2*"],
    "halves": ["__half", "__half2", "__nv_bfloat16", "__nv_bfloat162 const*"],
    "functions": ["void (*)(int, float*)", "int (*)(int (*)(int))", "float"],
    "alone": [],
}


@pytest.fixture(scope="module", params=['extern "C" __global__ void', "__global__ void"])
def typed(request: pytest.FixtureRequest, toolchain: Toolchain) -> dict[str, EntryPoint]:
    return entries(toolchain, TYPES.replace("HEAD", request.param))


@pytest.mark.parametrize("kernel", SPELLED)
def test_types_are_reported_with_and_without_extern_c(
    typed: dict[str, EntryPoint], kernel: str
) -> None:
    assert types(typed[kernel]) == SPELLED[kernel]


def test_types_and_sizes_belong_together(typed: dict[str, EntryPoint]) -> None:
    sizes = {p.type: p.size for e in typed.values() for p in e.parameters}
    assert {t: sizes[t] for t in ("bool", "__half", "float4", "Plain", "shapes::Box<double, 2>")} == {
        "bool": 1,
        "__half": 2,
        "float4": 16,
        "Plain": 16,
        "shapes::Box<double, 2>": 16,
    }
    assert all(size == 8 for t, size in sizes.items() if str(t).endswith(("*", "&", "[4]", ")")))


# Declarations


@pytest.mark.parametrize(
    "head",
    [
        "__global__ void",
        "void __global__",
        "__global__ void __launch_bounds__(128)",
        "__global__ void __launch_bounds__(64 * (1 + 1), 2)",
        "__launch_bounds__(128) __global__ void",
        "__global__ __launch_bounds__(128) void",
        "__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128)",
        "__global__ void __maxnreg__(64)",
        "__attribute__((used)) __global__ void",
        "__global__\n    void // the kernel\n",
        "__global__ void /* int k( */",
    ],
)
def test_an_extern_c_kernel_is_probed_whatever_stands_in_front(head: str) -> None:
    program = Program.of(f'extern "C" {head} k(float* x, int n) {{ *x = n; }}\n')
    assert list(signature.probes(program)) == ["k"]


def test_launch_bounds_after_the_return_type_cost_no_second_compile(
    events: Events, recorder: Recorder
) -> None:
    toolchain = Toolchain(events, timeout=TIMEOUT_SECONDS)
    found = entries(
        toolchain, 'extern "C" __global__ void __launch_bounds__(128) k(float* x) { *x = 1; }'
    )
    toolchain.close()
    assert types(found["k"]) == ["float*"]
    assert [e["what"] for e in recorder.named("worker")] == ["started"]


def test_an_extern_c_block_is_probed_kernel_by_kernel(toolchain: Toolchain) -> None:
    source = """
    extern "C" {
    __device__ int helper(int x) { if (x) { return 1; } return 2; }
    __global__ void a(int* x) { *x = helper(*x); }
    // __global__ void neither(int)
    __global__ void b(float x, int* y) { *y = x; }
    }
    __global__ void c(double* x) { *x = 1; }
    """
    found = entries(toolchain, source)
    assert {name: types(e) for name, e in found.items()} == {
        "a": ["int*"],
        "b": ["float", "int*"],
        "c": ["double*"],
    }


def test_a_kernel_behind_a_macro_is_found_where_the_macro_spells_it_out(toolchain: Toolchain) -> None:
    source = '#define API extern "C" __global__ void\nAPI k(float* x) { *x = 1; }'
    assert types(entries(toolchain, source)["k"]) == ["float*"]


def test_a_kernel_that_is_declared_first_is_one_kernel(toolchain: Toolchain) -> None:
    source = (
        'extern "C" __global__ void k(float* x);\nextern "C" __global__ void k(float* x) { *x = 1; }'
    )
    assert types(entries(toolchain, source)["k"]) == ["float*"]


@pytest.mark.parametrize(
    "source",
    [
        'extern "C" {\n#if 0\n__global__ void gone(int* x) {}\n#endif\n'
        "__global__ void k(float* x) { *x = 1; }\n}",
        '#define K(name) extern "C" __global__ void name\nK(gone)() {}\n#undef K\n'
        'extern "C" __global__ void k(float* x) { *x = 1; }',
        'namespace hidden { extern "C" __global__ void k(float* x) { *x = 1; } }',
        'extern "C" __global__ void k(float* x) { *x = 1; }\n// a line that goes on \\',
    ],
)
def test_a_wrong_guess_costs_no_types_of_other_kernels(toolchain: Toolchain, source: str) -> None:
    assert types(entries(toolchain, source)["k"]) == ["float*"]


# The other function, and how often the compiler is called.
CLASHES = {
    "a function that returns a value": ("__device__ float foo(float x) { return x; }", 1),
    "a function that returns void": ("__device__ void foo(float x) {}", 2),
    "a template": ("template <class T> __device__ T foo(T x) { return x; }", 2),
    "a kernel": ("__global__ void foo(int x) {}", 2),
}


@pytest.mark.parametrize("clash", CLASHES)
def test_a_kernel_with_the_name_of_another_function_has_its_types(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, clash: str
) -> None:
    other, compiles = CLASHES[clash]
    call = Mock(wraps=toolchain.pool.call)
    monkeypatch.setattr(toolchain.pool, "call", call)
    source = f"""
    extern "C" __global__ void k(float a, float* y) {{ *y = a; }}
    {other}
    extern "C" __global__ void foo(
        const float* x, /* out */ float (*y)[4] = nullptr, int n = (1, 2)) {{}}
    """
    compiled = toolchain.compile(Program.of(source), SM_90)
    found = {e.name: types(e) for e in compiled.entries}
    assert found["k"] == ["float", "float*"]
    assert found["foo"] == ["float const*", "float (*) [4]", "int"]
    assert [each.args[0]["do"] for each in call.mock_calls].count("cuda") == compiles


def test_a_kernel_with_the_name_of_a_function_of_cuda_has_its_types(toolchain: Toolchain) -> None:
    source = """
    #include <cuda_fp16.h>
    extern "C" __global__ void hexp(__half x, __half* y) { *y = hexp(x); }
    """
    assert types(entries(toolchain, source)["hexp"]) == ["__half", "__half*"]


UNKNOWN = {
    "is also the name of other functions; rename": """
        #define SCALAR float
        template <class T> __device__ void foo(T x) {}
        extern "C" __global__ void foo(SCALAR x, float* y) { *y = x; }
        #undef SCALAR""",
    "comes from a macro or a header file; declare it in the source": """
        #define KERNEL(name) extern "C" __global__ void name
        KERNEL(foo)(float x, float* y) { *y = x; }""",
}


@pytest.mark.parametrize("reason", UNKNOWN)
def test_a_kernel_that_cannot_be_probed_says_so_and_the_others_have_their_types(
    toolchain: Toolchain, reason: str
) -> None:
    source = UNKNOWN[reason] + '\nextern "C" __global__ void k(float a, float* y) { *y = a; }'
    found = entries(toolchain, source)
    assert types(found["k"]) == ["float", "float*"]
    assert str(found["k"]) == "k(float, float*)"
    assert found["k"].untyped is None
    assert types(found["foo"]) == [None, None]
    assert found["foo"].prototype == "foo(f32, u64)"
    assert str(found["foo"]).startswith("foo(f32, u64): the C++ types of foo are unknown, because ")
    assert reason in str(found["foo"])


def test_cpp11_which_has_no_probes_says_so(toolchain: Toolchain) -> None:
    source = 'extern "C" __global__ void k(float* x) { *x = 1; }'
    (found,) = toolchain.compile(Program.of(source, options=["-std=c++11"]), SM_90).entries
    assert types(found) == [None]
    assert found.untyped == "C++11 has no templates of variables; compile the program as C++14 or newer"


@pytest.mark.parametrize(
    ("declared", "cast"),
    [
        ("k(float* x, int n = 3)", "void (*)(float* x, int n)"),
        ("k()", "void (*)()"),
        ("k(int (*f)(int, int), int g)", "void (*)(int (*f)(int, int), int g)"),
        ("k(char c = ',')", "void (*)(char c)"),
        ("k(float* x\n#ifdef N\n, int n\n#endif\n)", None),
        ("k(float* x", None),
    ],
)
def test_the_second_probe_has_the_parameters_of_the_declaration(
    declared: str, cast: str | None
) -> None:
    program = Program.of(f'extern "C" __global__ void {declared} {{}}')
    assert signature.probes(program) == {"k": "&__preheat_sig<decltype(__preheat_kernel(k))::type>"}
    expected = {} if cast is None else {"k": f"&__preheat_sig<decltype(static_cast<{cast}>(k))>"}
    assert signature.cast_probes(program) == expected


def test_an_error_next_to_a_wrong_guess_is_reported_without_the_probe(toolchain: Toolchain) -> None:
    source = (
        'extern "C" {\n#if 0\n__global__ void gone() {}\n#endif\n}\n__global__ void k() { oops(); }'
    )
    with pytest.raises(CompileError) as caught:
        toolchain.compile(Program.of(source), SM_90)
    assert [row.message for row in caught.value.rows] == ['identifier "oops" is undefined']
    assert "__preheat_sig" not in caught.value.log


def test_a_program_with_only_plain_kernels_is_not_probed() -> None:
    source = '__global__ void k(int x) {}\nextern "C" __device__ int f() { return 1; }\n'
    assert signature.probes(Program.of(source)) == {}


# Names


def test_templates_namespaces_and_anonymous_ones_have_their_cpp_names(toolchain: Toolchain) -> None:
    source = """
    template <class T, int N> __global__ void tk(T* x) {}
    namespace outer { namespace inner { __global__ void deep(int* x) { *x = 1; } } }
    namespace outer { template <class T> struct Tag {}; }
    namespace { struct Own { int a; }; __global__ void hidden(Own o, int* x) { *x = o.a; } }
    template <class... T> __global__ void pack(T... x) {}
    """
    names = ["tk<float, 3>", "tk<outer::Tag<int>*, 2 + 2>", "pack<int, char>", "pack<>"]
    found = entries(toolchain, source, names)
    assert {name: types(e) for name, e in found.items()} == {
        "tk<float, 3>": ["float*"],
        "tk<outer::Tag<int>*, 4>": ["outer::Tag<int>**"],
        "outer::inner::deep": ["int*"],
        "(anonymous namespace)::hidden": ["(anonymous namespace)::Own", "int*"],
        "pack<int, char>": ["int", "char"],
        "pack<>": [],
    }


def test_name_expressions_give_lowered_names(toolchain: Toolchain) -> None:
    source = """
    extern "C" __global__ void plain(int* x) { *x = 1; }
    __global__ void cpp(int* x) { *x = 1; }
    template <class T> __global__ void tk(T* x) { *x = 1; }
    """
    names = ("plain", "cpp", "tk<float>", "&tk<double>")
    compiled = toolchain.compile(Program.of(source, names=names), SM_90)
    assert compiled.names == {
        "plain": "plain",
        "cpp": "_Z3cppPi",
        "tk<float>": "_Z2tkIfEvPT_",
        "&tk<double>": "_Z2tkIdEvPT_",
    }
    assert {e.name for e in compiled.entries} == set(compiled.names.values())
    assert all(p.type is not None for e in compiled.entries for p in e.parameters)


OVERLOADED = "__global__ void k(int* x) { *x = 1; }\n__global__ void k(float* x) { *x = 1; }"


def test_overloaded_kernels_are_two_entries(toolchain: Toolchain) -> None:
    compiled = toolchain.compile(Program.of(OVERLOADED), SM_90)
    assert [(e.cpp, types(e)) for e in compiled.entries] == [("k", ["int*"]), ("k", ["float*"])]


def test_one_of_two_overloads_is_named_by_its_type(toolchain: Toolchain) -> None:
    program = Program.of(OVERLOADED, names=["(void (*)(float*))k"])
    assert toolchain.compile(program, SM_90).names == {"(void (*)(float*))k": "_Z1kPf"}


def test_an_ambiguous_name_is_the_compilers_own_error(toolchain: Toolchain) -> None:
    with pytest.raises(CompileError, match="which instance of overloaded function"):
        toolchain.compile(Program.of(OVERLOADED, names=["k"]), SM_90)


NAMED = """
__global__ void saxpy(int* x) { *x = 1; }
namespace math {
__global__ void scale(int* x) { *x = 1; }
template <class T> __global__ void fill(T* x, T value) { *x = value; }
}
template <class T, int N> __global__ void tk(T* x) { *x = N; }
template <class T> __device__ T twice(T x) { return x + x; }
__device__ int zz;
"""
INSTANCE = "name an instance of the template tk<class T, int N>, such as 'tk<float, 1>'"


@pytest.mark.parametrize(
    ("name", "words", "hint"),
    [
        ("saxpi", 'identifier "saxpi" is undefined', "did you mean 'saxpy'?"),
        ("scal", 'identifier "scal" is undefined', "did you mean 'math::scale'?"),
        ("fill<int>", 'identifier "fill" is undefined', "did you mean 'math::fill<int>'?"),
        ("gone<float>", 'identifier "gone" is undefined', None),
        ("tkk<float, 3>", 'identifier "tkk" is undefined', "did you mean 'tk<float, 3>'?"),
        ("tk<flot, 3>", 'identifier "flot" is undefined', INSTANCE),
        ("tk<float>", 'cannot determine which instance of function template "tk"', INSTANCE),
        ("tk<", "expected an expression", INSTANCE),
        ("twice<int>", "cannot form address of a non-__global__", None),
        ("zz", "must form address of a __global__", None),
    ],
)
def test_an_unknown_name_has_the_message_of_the_compiler_and_the_known_names(
    toolchain: Toolchain, monkeypatch: pytest.MonkeyPatch, name: str, words: str, hint: str | None
) -> None:
    call = Mock(wraps=toolchain.pool.call)
    monkeypatch.setattr(toolchain.pool, "call", call)
    with pytest.raises(UnknownEntryError) as caught:
        toolchain.compile(Program.of(NAMED, label="k.cu", names=["tk<float, 3>", name]), SM_90)
    error = caught.value
    assert (error.name, error.program, error.known) == (name, "k.cu", ("saxpy", "math::scale"))
    assert error.templates == ("math::fill<class T>", "tk<class T, int N>")
    assert error.reason is not None
    assert words in error.reason
    assert "__preheat_sig" not in str(error)
    assert str(error).startswith(f"k.cu has no kernel {name!r}: {error.reason}; it has: saxpy, ")
    assert error.hint == hint
    assert call.call_count == 1


def test_a_name_in_a_program_without_kernels_has_the_message_of_the_compiler(
    toolchain: Toolchain,
) -> None:
    with pytest.raises(UnknownEntryError) as caught:
        toolchain.compile(Program.of("__device__ int x;", label="k.cu", names=["k"]), SM_90)
    assert str(caught.value) == """k.cu has no kernel 'k': identifier "k" is undefined"""


def test_an_error_of_the_program_comes_before_names_that_are_unknown(toolchain: Toolchain) -> None:
    program = Program.of("__global__ void k() { oops(); }", names=["gone"])
    with pytest.raises(CompileError) as caught:
        toolchain.compile(program, SM_90)
    assert caught.value.rows[0].message == 'identifier "oops" is undefined'


def test_the_templates_of_a_program_are_kept_with_its_code(toolchain: Toolchain) -> None:
    program = Program.of("template <class T> __global__ void tk(T* x) { *x = 1; }")
    assert toolchain.compile(program, SM_90).templates == ("tk<class T>",)


DECLARED = """
namespace a { inline namespace b::c { __global__ void deep(int*); } namespace { void __global__ own();}}
template <class T, int N = (3 > 2)> __launch_bounds__(32) __global__ void tk(T* x) { if (*x < N) *x=1; }
template <> __global__ void tk<a::Tag<int>, 4>(a::Tag<int>*);
template __global__ void tk<float, 4>(float*);
template <template <class> class C, class... R> __global__ void __launch_bounds__(1, 2) pack(C<R...>) {}
extern "C" { __global__ void plain(int); }
using namespace a;
__global__ void plain(int);  // declared again
template <class T> __device__ T helper(T x) { return x; }
"""


def test_declared_kernels_and_templates_are_read_from_the_source() -> None:
    in_memory = {"more.h": "template <int N> __global__ void more() {}"}
    kernels, templates = signature.declared_kernels(Program.of(DECLARED, headers=in_memory))
    instances = ["tk<a::Tag<int>, 4>", "tk<float, 4>"]
    assert list(dict.fromkeys(kernels)) == ["a::b::c::deep", "a::own", *instances, "plain"]
    assert templates == [
        "tk<class T, int N = (3 > 2)>",
        "pack<template <class> class C, class... R>",
        "more<int N>",
    ]


# Reading mangled names


def entry(spelled: str, count: int, *, probed: bool) -> EntryPoint:
    """Return the entry of a kernel with `count` parameters and this demangled name."""
    params = ", ".join(f".param .u64 p{i}" for i in range(count))
    module = ptx.parse(f".version 8.0\n.target sm_90\n.entry k({params}) {{ ret; }}")
    demangled, signatures = ({}, {"k": spelled}) if probed else ({"k": spelled}, {})
    (found,) = signature.entry_points(module, demangled, signatures, {})
    return found


@pytest.mark.parametrize(
    ("spelled", "expected"),
    [
        ("__preheat_sig<void (float, int*)>", ["float", "int*"]),
        ("__preheat_sig<void (*)(float, int*)>", ["float", "int*"]),
        ("__preheat_sig<void (std::pair<int, int>, void (*)(int, int))>",
         ["std::pair<int, int>", "void (*)(int, int)"]),
        ("__preheat_sig<void (int)>", [None, None]),  # not as many as the code takes
        ("__preheat_sig<int>", [None, None]),
        ("", [None, None]),
    ],
)  # fmt: skip
def test_a_probe_is_believed_when_it_fits_the_code(spelled: str, expected: list[str | None]) -> None:
    assert types(entry(spelled, 2, probed=True)) == expected


@pytest.mark.parametrize(
    ("spelled", "name"),
    [
        ("k(int)", "k"),
        ("void tk<float, 3>(int)", "tk<float, 3>"),
        ("void ns::tk<void (*)(int)>(int)", "ns::tk<void (*)(int)>"),
        ("(anonymous namespace)::k(int)", "(anonymous namespace)::k"),
        ("k((anonymous namespace)::S)", "k"),
        ("voided(int)", "voided"),
        ("variable", "variable"),
    ],
)
def test_the_cpp_name_is_what_stands_before_the_parameters(spelled: str, name: str) -> None:
    assert entry(spelled, 1, probed=False).cpp == name
