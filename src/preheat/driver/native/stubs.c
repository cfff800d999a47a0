/* The entry points: each one puts the number of its slot into a register and jumps through the table.

   The arguments stay where they are. No function that the driver implements takes a floating-point
   number by value, so that the vector registers need not be kept. */
#include "driver.h"

#ifndef __x86_64__
#error "the CPU driver has entry points for x86-64 alone"
#endif

#define TEXT_OF(value) #value
#define TEXT(value) TEXT_OF(value)
#define STUB(symbol, slot)                                          \
    __asm__(".text\n.globl " #symbol "\n.type " #symbol ",@function\n" #symbol \
            ":\n\tmovl $" TEXT(slot) ", %r11d\n\tjmp *driver_table+8*" TEXT(slot) "(%rip)\n.size " #symbol ",.-" #symbol "\n");

#define E(name, version, per_thread, symbol, kinds) STUB(symbol, __COUNTER__)
#include "entry_points.def"
#undef E

_Static_assert(__COUNTER__ == SLOTS, "each entry point has the number of its slot");

__asm__(
    ".globl driver_first_call\n.hidden driver_first_call\n.type driver_first_call,@function\n"
    "driver_first_call:\n"
    "\tpush %rbp\n\tmov %rsp, %rbp\n"
    "\tpush %rdi\n\tpush %rsi\n\tpush %rdx\n\tpush %rcx\n\tpush %r8\n\tpush %r9\n"
    "\tpush %r11\n\tsub $8, %rsp\n" /* The stack stays aligned to 16 bytes. */
    "\tmov %r11d, %edi\n\tcall driver_resolve\n\tmov %rax, %r10\n"
    "\tadd $8, %rsp\n\tpop %r11\n"
    "\tpop %r9\n\tpop %r8\n\tpop %rcx\n\tpop %rdx\n\tpop %rsi\n\tpop %rdi\n\tpop %rbp\n"
    "\tjmp *%r10\n"
    ".size driver_first_call,.-driver_first_call\n"
    ".globl driver_refuse\n.hidden driver_refuse\n.type driver_refuse,@function\n"
    "driver_refuse:\n\tmov %r11d, %edi\n\tjmp driver_count_refused\n"
    ".size driver_refuse,.-driver_refuse\n"
    ".globl driver_release\n.hidden driver_release\n.type driver_release,@function\n"
    "driver_release:\n\tpush %r11\n\tcall driver_call_release\n\tadd $8, %rsp\n\tret\n"
    ".size driver_release,.-driver_release\n");
