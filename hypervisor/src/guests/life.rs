//! The work of a processor between two guests, and the end of guests.

use alloc::vec;
use core::sync::atomic::Ordering;

use super::crowd::Crowd;
use super::gic;
use super::vcpu::State;
use crate::count::count;
use crate::counters::Count;
use crate::cpu;
use crate::stage2::PAGE;
use crate::world::world;

/// Takes a frame away from one of the guests, if it is time.
pub fn look_after(crowd: &Crowd) {
    let vms = &world().vms;
    if crowd.live.load(Ordering::Relaxed) != 0 {
        let guest = crowd.next.fetch_add(1, Ordering::Relaxed) % vms.len();
        vms[guest].evict(cpu::number());
    }
}

/// Switches a guest off, and with the last one the machine.
pub fn end(crowd: &Crowd, guest: usize) {
    if crowd.guests[guest].over.swap(true, Ordering::Relaxed) {
        return;
    }
    count(Count::Ended, 1);
    crowd.of(guest).iter().for_each(gic::nudge);
    if crowd.live.fetch_sub(1, Ordering::AcqRel) != 1 {
        return;
    }
    // Of others a vCPU may be about to leave, which has nothing to say.
    let runs_elsewhere = |vcpu: &super::vcpu::Vcpu| {
        vcpu.state() == State::Running && vcpu.home.load(Ordering::Relaxed) != cpu::number()
    };
    while crowd.vcpus.iter().any(runs_elsewhere) {
        core::hint::spin_loop();
    }
    compare();
    let _ = smccc::psci::system_off::<smccc::Smc>();
}

/// Looks whether each frame is behind one page of one guest, and each page is mapped to its own.
fn compare() {
    let vms = &world().vms;
    let last = vms.iter().flat_map(|vm| vm.memory.frames()).max();
    let mut seen = vec![0_u64; (last.unwrap_or(0) / PAGE / 64 + 1) as usize];
    for vm in vms {
        for (number, frame) in (0..).zip(vm.memory.frames()) {
            let (word, bit) = ((frame / PAGE / 64) as usize, frame / PAGE % 64);
            let is_double = seen[word] >> bit & 1 != 0;
            seen[word] |= 1 << bit;
            let Some(at) = vm.memory.at(number) else {
                break;
            };
            let mapped = vm.guest.space().query(at);
            let is_other = mapped.is_some_and(|leaf| {
                let inside = at.get() - leaf.input().get();
                leaf.frame().get() + inside != frame
            });
            count(Count::Strays, u64::from(is_double || is_other));
            count(Count::Own, 1);
        }
    }
}
