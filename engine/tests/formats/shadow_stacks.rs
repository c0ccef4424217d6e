//! Pages that shadow stacks alone may write, by SDM vol. 3A 5.6.

use tablewright::format::{Format, PAT, SHADOW_STACKS, X86_64, encrypted};
use tablewright::{Attrs, Level, Memory, Pa, Perms};
use tablewright_walker as walker;

use super::{each_attrs, refused, walk};

type Cet = X86_64<4, PAT, SHADOW_STACKS>;

/// The native bit, by hand: bits 58:52 are ignored (SDM 5.5.4).
pub const SHADOW_STACK: u64 = 1 << 54;
const WRITE: u64 = 1 << 1;
const DIRTY: u64 = 1 << 6;

/// A page that says so is one of a shadow stack exactly while it may be written and is dirty, and
/// never one that software may write otherwise.
#[test]
fn a_page_is_one_of_a_shadow_stack_while_it_is_written() {
    assert_eq!(Cet::SHADOW_STACK, SHADOW_STACK);
    assert_eq!(X86_64::<4>::SHADOW_STACK, 0);
    let (mut stacks, mut seen) = (0, std::collections::HashSet::new());
    for level in [Level::PAGE, Level::new(1), Level::new(2)] {
        seen.clear();
        each_attrs(&[0, 5], |attrs| {
            let attrs = Attrs { native: SHADOW_STACK | 3 << 59, ..attrs };
            let Ok(bits) = Cet::encode(&attrs, level) else {
                assert!(refused::<Cet>(&attrs), "{attrs:?}");
                return;
            };
            assert!(!refused::<Cet>(&attrs), "{attrs:?}");
            let leaf = Cet::with_address(bits, Pa::new(1 << 39));
            assert!(seen.insert(bits), "another has {leaf:#x}, too");
            assert_eq!(Cet::decode(leaf, level), attrs, "{leaf:#x}");
            if attrs.perms.is_empty() {
                return;
            }
            let is_stack = leaf & (WRITE | DIRTY) == DIRTY;
            assert_eq!(is_stack, attrs.perms.contains(Perms::WRITE) && attrs.dirty, "{leaf:#x}");
            stacks += u32::from(is_stack);
            let found: walker::Leaf = walk::<Cet>(leaf, level).unwrap();
            assert!(!found.access.user.write && !found.access.privileged.write, "{leaf:#x}");
            assert_eq!(found.pa, 1 << 39);
            // A table above that denies writing denies it to shadow stacks.
            let denied = Cet::restricted(Cet::meaning(leaf), level, Perms::ANY_WRITE);
            let left = Cet::decode_meaning(denied, level).perms;
            assert_eq!(left, attrs.perms - Perms::ANY_WRITE, "{leaf:#x}");
            let resumed = Cet::resume(Cet::suspend(leaf));
            assert_eq!(resumed, leaf);
        });
    }
    assert!(stacks > 200, "{stacks}");
}

#[test]
fn shadow_stacks_go_with_encrypted_memory() {
    type Both = X86_64<4, PAT, { encrypted(51) | SHADOW_STACKS }>;
    let native = Both::MARK | Both::SHADOW_STACK;
    let stack = Attrs { native, memory: Memory::Normal, ..Attrs::USER_DATA };
    let leaf = Both::encode(&stack, Level::PAGE).unwrap();
    assert_eq!(leaf & (native | WRITE | DIRTY), native | DIRTY);
    assert_eq!(Both::decode(leaf, Level::PAGE), stack);
    assert_eq!(Both::table(Pa::new(0x1000), Perms::empty()) & native, Both::MARK);
    assert_eq!(Both::OUTPUT_BITS, 51);
    // A format without shadow stacks refuses the bit.
    let refused = X86_64::<4>::encode(&Attrs { native: SHADOW_STACK, ..stack }, Level::PAGE);
    assert!(refused.is_err());
}
