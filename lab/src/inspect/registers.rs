//! The registers that say where tables are, by their names, and the trees of tables that they name.

use std::collections::BTreeMap;

use tablewright_walker::{Half, Regime};
use tablewright_watch::arm64::{self, Part};
use tablewright_watch::riscv64;
use tablewright_watch::x86_64::Control;

/// Values by names in small letters: `ttbr1`, `cr3`, `satp`.
#[derive(Clone, Debug, Default)]
pub struct Registers(BTreeMap<&'static str, u64>);

/// Names that are known.
const NAMES: [&str; 23] = [
    "ttbr0",
    "ttbr1",
    "tcr",
    "sctlr",
    "mair",
    "hcr",
    "vttbr",
    "vtcr",
    "ttbr0_el2",
    "ttbr1_el2",
    "tcr_el2",
    "sctlr_el2",
    "mair_el2",
    "cr0",
    "cr3",
    "cr4",
    "efer",
    "pat",
    "eptp",
    "ncr3",
    "satp",
    "vsatp",
    "hgatp",
];

/// The name in small letters, without an exception level that is clear.
fn known(name: &str) -> Option<&'static str> {
    let name = name.to_ascii_lowercase();
    let plain = name.strip_suffix("_el1").unwrap_or(&name);
    let plain = match plain {
        "hcr_el2" | "vttbr_el2" | "vtcr_el2" => plain.trim_end_matches("_el2"),
        plain => plain,
    };
    NAMES.into_iter().find(|known| *known == plain)
}

/// Tables under one root, and how they are read.
#[derive(Clone, Copy, Debug)]
pub struct Tree {
    /// The register.
    pub name: &'static str,
    pub regime: Regime,
    /// Its physical address; the guest's, if there is a [`stage2`](Self::stage2).
    pub root: u64,
    /// The half of the addresses that it translates, where each has a root.
    pub half: Half,
    /// The root of the translation of the addresses in it, and how it is read.
    pub stage2: Option<(Regime, u64)>,
    /// MAIR or IA32_PAT, which say what the numbers of memory types mean.
    pub types: Option<u64>,
}

impl Tree {
    /// A tree that translates all addresses by itself.
    fn alone(name: &'static str, (regime, root): (Regime, u64)) -> Self {
        Self { name, regime, root, half: Half::Lower, stage2: None, types: None }
    }

    /// Whether an address is in the half that it translates.
    pub fn has(&self, address: u64) -> bool {
        match self.regime {
            Regime::Arm64Stage1Sized { .. } => (self.half == Half::Upper) == (address >> 63 != 0),
            _ => true,
        }
    }

    /// Whether it translates what a guest takes for physical addresses.
    pub fn is_stage2(&self) -> bool {
        matches!(
            self.regime,
            Regime::Arm64Stage2 { .. }
                | Regime::Ept { .. }
                | Regime::Npt { .. }
                | Regime::Riscv { guest: true, .. }
        )
    }
}

impl Registers {
    /// Whether one of this name says something.
    pub fn is_one(name: &str) -> bool {
        known(name).is_some()
    }

    /// Sets one. `false`: there is no such.
    pub fn set(&mut self, name: &str, value: u64) -> bool {
        known(name).map(|name| self.0.insert(name, value)).is_some()
    }

    /// All that are known.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> {
        self.0.iter().map(|(name, value)| (*name, *value))
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Takes those of others that they have.
    pub fn extend(&mut self, others: &[(String, u64)]) -> Result<(), String> {
        for (name, value) in others {
            if !self.set(name, *value) {
                return Err(format!("--reg {name}: the registers are {}", NAMES.join(", ")));
            }
        }
        Ok(())
    }

    fn get(&self, name: &str) -> Option<u64> {
        self.0.get(name).copied()
    }

    fn or_zero(&self, name: &str) -> u64 {
        self.get(name).unwrap_or(0)
    }

    /// Reads a processor of x86-64 in a core that QEMU wrote (target/i386/arch_dump.c: a version,
    /// a size, 18 registers of 8 bytes, 10 segments of 24, and CR0 to CR4).
    pub fn of_qemu_note(note: &[u8]) -> Option<Self> {
        const CR: usize = 8 + 18 * 8 + 10 * 24;
        let word = |at: usize| Some(u64::from_le_bytes(note.get(at..at + 8)?.try_into().ok()?));
        let mut registers = Self::default();
        for (name, number) in [("cr0", 0), ("cr3", 3), ("cr4", 4)] {
            registers.set(name, word(CR + 8 * number)?);
        }
        Some(registers)
    }

    /// Returns the trees that they name. A guest's tree carries the stage 2 behind it.
    pub fn trees(&self) -> Result<Vec<Tree>, String> {
        let mut trees = Vec::new();
        let stage2 = self.stage2(&mut trees)?;
        self.arm64(stage2, &mut trees)?;
        if let Some(cr3) = self.get("cr3") {
            // Without the others, paging is on, in long mode.
            let control = Control {
                cr0: self.get("cr0").unwrap_or(1 << 31),
                cr3,
                cr4: self.or_zero("cr4"),
                efer: self.get("efer").unwrap_or(1 << 10),
            };
            if let Some((root, regime, _)) = control.root() {
                let types = self.get("pat");
                trees.push(Tree { stage2, types, ..Tree::alone("CR3", (regime, root)) });
            }
        }
        let sv = |name, guest| {
            let (root, regime, _) = riscv64::root(self.or_zero(name), guest)?;
            Some((regime, root))
        };
        let hgatp = sv("hgatp", true);
        trees.extend(hgatp.map(|tree| Tree::alone("hgatp", tree)));
        let vsatp = sv("vsatp", false);
        trees.extend(vsatp.map(|tree| Tree { stage2: hgatp, ..Tree::alone("vsatp", tree) }));
        let satp = sv("satp", false);
        trees.extend(satp.map(|tree| Tree::alone("satp", tree)));
        Ok(trees)
    }

    /// Adds the tree of a stage 2, if there is one.
    fn stage2(&self, trees: &mut Vec<Tree>) -> Result<Option<(Regime, u64)>, String> {
        if let Some(eptp) = self.get("eptp") {
            // SDM vol. 3C 25.6.11: bits 5:3 are the levels less one.
            let levels = (eptp >> 3 & 7) as u8 + 1;
            if !matches!(levels, 4 | 5) {
                return Err(format!("eptp {eptp:#x}: it has {levels} levels, and EPT has 4 or 5"));
            }
            let tree = (Regime::Ept { levels, mode_based: false }, eptp & 0xf_ffff_ffff_f000);
            trees.push(Tree::alone("EPTP", tree));
            return Ok(Some(tree));
        }
        if let Some(ncr3) = self.get("ncr3") {
            let tree = (Regime::Npt { levels: 4 }, ncr3 & 0xf_ffff_ffff_f000);
            trees.push(Tree::alone("nCR3", tree));
            return Ok(Some(tree));
        }
        // HCR_EL2.VM.
        let is_on = self.get("hcr").is_none_or(|hcr| hcr & 1 != 0);
        let (Some(vttbr), Some(vtcr)) = (self.get("vttbr"), self.get("vtcr")) else {
            return Ok(None);
        };
        if !is_on || vttbr == 0 {
            return Ok(None);
        }
        let forced = self.or_zero("hcr") >> 46 & 1 != 0;
        let tree = arm64::stage2(vtcr, vttbr, forced).ok_or_else(|| {
            format!("vtcr {vtcr:#x}: it starts at a level that is not known here")
        })?;
        trees.push(Tree::alone("VTTBR", tree));
        Ok(Some(tree))
    }

    fn arm64(&self, stage2: Option<(Regime, u64)>, trees: &mut Vec<Tree>) -> Result<(), String> {
        // HCR_EL2.E2H: EL2 has two halves, as EL1.
        let is_host = self.or_zero("hcr") >> 34 & 1 != 0;
        let levels = [
            (["ttbr0", "ttbr1", "tcr", "sctlr", "mair"], ["TTBR0", "TTBR1"], stage2),
            (
                ["ttbr0_el2", "ttbr1_el2", "tcr_el2", "sctlr_el2", "mair_el2"],
                ["TTBR0_EL2", "TTBR1_EL2"],
                None,
            ),
        ];
        for ([ttbr0, ttbr1, tcr, sctlr, mair], names, stage2) in levels {
            let roots = [self.get(ttbr0), self.get(ttbr1)];
            if roots == [None, None] {
                continue;
            }
            let is_el2 = ttbr0 == "ttbr0_el2";
            let tcr = match self.get(tcr) {
                Some(tcr) => tcr,
                None => {
                    let given = if roots[0].is_some() { ttbr0 } else { ttbr1 };
                    return Err(format!("{given} needs --reg {tcr}=VALUE"));
                }
            };
            let registers = arm64::Registers {
                sctlr: self.get(sctlr).unwrap_or(1),
                ttbr: roots.map(Option::unwrap_or_default),
                tcr,
                ..arm64::Registers::default()
            };
            let types = self.get(mair);
            for (part, half) in [(Part::Lower, Half::Lower), (Part::Upper, Half::Upper)] {
                let number = part as usize;
                if roots[number].is_none_or(|root| root == 0) {
                    continue;
                }
                let tree = match is_el2 && !is_host {
                    false => registers.root(part).map(|(root, regime, _)| (regime, root)),
                    true if part == Part::Upper => None,
                    true => arm64::el2(tcr, registers.ttbr[0]),
                };
                let Some((regime, root)) = tree else { continue };
                let name = names[number];
                trees.push(Tree { name, regime, root, half, stage2, types });
            }
        }
        Ok(())
    }
}

/// Registers that lead to the tables of a Linux kernel, by what it says of itself (its
/// Documentation/admin-guide/kdump/vmcoreinfo.rst). None: it says too little.
pub fn of_vmcoreinfo(text: &str) -> Registers {
    let value = |name: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
        let line = line.trim_end_matches('\0');
        match line.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16).ok(),
            // Symbols are in hexadecimal digits without a sign.
            None if name.starts_with("SYMBOL") => u64::from_str_radix(line, 16).ok(),
            None => line.parse::<i64>().ok().map(|number| number as u64),
        }
    };
    let mut registers = Registers::default();
    let Some(root) = value("SYMBOL(swapper_pg_dir)") else { return registers };
    if let Some(offset) = value("NUMBER(kimage_voffset)") {
        let page = value("PAGESIZE").unwrap_or(4096);
        let (tg1, is_small) = match page {
            0x4000 => (1, true),
            0x1_0000 => (3, false),
            _ => (2, true),
        };
        let size = value("NUMBER(TCR_EL1_T1SZ)").unwrap_or(16) & 0x3f;
        // More than 48 bits of 4 and 16 KiB are those of wide descriptors, TCR_EL1.DS.
        let wide = u64::from(size < 16 && is_small);
        registers.set("ttbr1", root.wrapping_sub(offset));
        registers.set("tcr", size << 16 | tg1 << 30 | wide << 59);
    } else if let Some(base) = value("NUMBER(phys_base)") {
        let five = value("NUMBER(pgtable_l5_enabled)").unwrap_or(0) & 1;
        registers.set("cr3", root.wrapping_sub(0xffff_ffff_8000_0000).wrapping_add(base));
        registers.set("cr4", five << 12);
    } else if let (Some(offset), Some(bits)) =
        (value("NUMBER(va_kernel_pa_offset)"), value("NUMBER(VA_BITS)"))
    {
        let mode = match bits {
            57 => 10,
            48 => 9,
            _ => 8,
        };
        registers.set("satp", mode << 60 | root.wrapping_sub(offset) >> 12);
    }
    registers
}

/// The granule of a regime in words.
pub fn shape(regime: Regime) -> String {
    let pages = match regime.page_shift() {
        12 => "4 KiB",
        14 => "16 KiB",
        _ => "64 KiB",
    };
    format!("pages of {pages}, addresses of {} bits", regime.input_bits())
}
