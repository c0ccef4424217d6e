//! CPUID of the guest: the processor, without features that are not let through, and Hyper-V (TLFS,
//! "Feature and Interface Discovery").

use core::arch::x86_64::{__cpuid_count, CpuidResult};

use tablewright::hyperv::{INTERFACE, features, hints};
use tablewright::shootdown::Cpus;

use crate::options::Flush;
use crate::world::World;

const NOTHING: CpuidResult = CpuidResult { eax: 0, ebx: 0, ecx: 0, edx: 0 };

/// The highest leaf of each kind.
const LAST: u32 = 0xb;
const LAST_OF_HYPERVISOR: u32 = 0x4000_0005;
const LAST_EXTENDED: u32 = 0x8000_0008;

// Leaf 1, ECX.
const X2APIC: u32 = 1 << 21;
const DEADLINE: u32 = 1 << 24;
const HYPERVISOR: u32 = 1 << 31;
/// MONITOR, VMX, FMA, PCID's neighbour DCA, XSAVE, OSXSAVE, AVX, F16C: what needs state that is not
/// exchanged, or is not emulated.
const HIDDEN_1_ECX: u32 =
    1 << 3 | 1 << 5 | 1 << 12 | 1 << 18 | 1 << 26 | 1 << 27 | 1 << 28 | 1 << 29;
/// Machine checks, MTRRs, thermal control.
const HIDDEN_1_EDX: u32 = 1 << 7 | 1 << 12 | 1 << 14 | 1 << 22 | 1 << 29;
const THREADS: u32 = 1 << 28;
/// Leaf 7, EBX: FSGSBASE, BMI1, SMEP, BMI2, ERMS, INVPCID, RDSEED, ADX, SMAP, CLFLUSHOPT, CLWB,
/// SHA.
const SHOWN_7_EBX: u32 = 1
    | 1 << 3
    | 1 << 7
    | 1 << 8
    | 1 << 9
    | 1 << 10
    | 1 << 18
    | 1 << 19
    | 1 << 20
    | 1 << 23
    | 1 << 24
    | 1 << 29;
/// Leaf 7, ECX: UMIP, RDPID.
const SHOWN_7_ECX: u32 = 1 << 2 | 1 << 22;
/// Leaf 8000_0001, ECX: LAHF, CR8, LZCNT, SSE4A, misaligned SSE, prefetch.
const SHOWN_EXTENDED_ECX: u32 = 1 | 1 << 4 | 1 << 5 | 1 << 6 | 1 << 7 | 1 << 8;
/// Leaf 8000_0007, EDX: the counter of time runs evenly.
const EVEN: u32 = 1 << 8;

// Leaf 4000_0003 beyond what the engine names: EAX, EDX.
const REFERENCE_COUNTER: u32 = 1 << 1;
const REFERENCE_PAGE: u32 = 1 << 9;
const FREQUENCIES: u32 = 1 << 11;
const EVEN_COUNTER: u32 = 1 << 15;
const FREQUENCIES_THERE: u32 = 1 << 8;

/// Answers CPUID of a vCPU.
pub fn answer(world: &World, number: u32, leaf: u32, subleaf: u32) -> CpuidResult {
    let count = world.vcpus.len() as u32;
    let mut said = match leaf {
        0x4000_0000..=LAST_OF_HYPERVISOR => return hypervisor(world, leaf),
        0..=LAST | 0x8000_0000..=LAST_EXTENDED => __cpuid_count(leaf, subleaf),
        _ => return NOTHING,
    };
    match leaf {
        0 => said.eax = LAST,
        1 => {
            said.ebx = said.ebx & 0xffff | count.min(255) << 16 | number << 24;
            said.ecx = said.ecx & !HIDDEN_1_ECX | X2APIC | DEADLINE | HYPERVISOR;
            said.edx &= !(HIDDEN_1_EDX | THREADS);
            if count > 1 {
                said.edx |= THREADS;
            }
        }
        // ARAT: the timer goes on while the processor sleeps.
        6 => said = CpuidResult { eax: 1 << 2, ..NOTHING },
        7 if subleaf == 0 => {
            said.eax = 0;
            said.ebx &= SHOWN_7_EBX;
            said.ecx &= SHOWN_7_ECX;
            said.edx &= 1 << 4;
        }
        5 | 7 | 10 => return NOTHING,
        0xb => {
            let bits = count.next_power_of_two().trailing_zeros();
            let (eax, ebx, kind) = match subleaf {
                0 => (0, 1, 1),
                1 => (bits, count, 2),
                _ => (0, 0, 0),
            };
            said = CpuidResult { eax, ebx, ecx: kind << 8 | subleaf & 0xff, edx: number };
        }
        0x8000_0000 => said.eax = LAST_EXTENDED,
        0x8000_0001 => {
            said.ecx &= SHOWN_EXTENDED_ECX;
            said.edx &= !HIDDEN_1_EDX | 1 << 29;
        }
        0x8000_0007 => said = CpuidResult { edx: EVEN, ..NOTHING },
        0x8000_0008 => (said.ebx, said.ecx, said.edx) = (0, count - 1, 0),
        _ => {}
    }
    said
}

fn hypervisor(world: &World, leaf: u32) -> CpuidResult {
    let word = |text: &[u8; 4]| u32::from_le_bytes(*text);
    match leaf {
        0x4000_0000 => CpuidResult {
            eax: LAST_OF_HYPERVISOR,
            ebx: word(b"Micr"),
            ecx: word(b"osof"),
            edx: word(b"t Hv"),
        },
        0x4000_0001 => CpuidResult { eax: INTERFACE, ..NOTHING },
        0x4000_0003 => CpuidResult {
            eax: REFERENCE_COUNTER
                | features::HYPERCALL_MSRS
                | features::VP_INDEX_MSR
                | REFERENCE_PAGE
                | FREQUENCIES
                | EVEN_COUNTER,
            edx: FREQUENCIES_THERE | features::XMM_INPUT | features::EXTENDED_RANGES,
            ..NOTHING
        },
        0x4000_0004 => CpuidResult {
            // This one bit is what the guest goes by.
            eax: match world.options.flush {
                Flush::Hypercall => hints::REMOTE_FLUSH,
                Flush::Extended => hints::REMOTE_FLUSH | hints::EX_PROCESSOR_MASKS,
                Flush::Interrupt => 0,
            },
            // Spinning is not reported.
            ebx: u32::MAX,
            ..NOTHING
        },
        0x4000_0005 => {
            CpuidResult { eax: Cpus::MOST as u32, ebx: crate::processor::MOST as u32, ..NOTHING }
        }
        _ => NOTHING,
    }
}
