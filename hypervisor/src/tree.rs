//! The device tree: what the machine has, and what of it the guest is told.
//!
//! A guest that sees its physical addresses through stage 2 is confined as long as only processors
//! use them. A device that reads and writes memory by itself is told physical addresses by the
//! guest, and goes around stage 2 where there is no system MMU. So the guest gets the devices on a
//! list of those that are known not to ([`KEPT`]), and no other is in its tree or in its stage 2:
//! no virtio, no PCI, no firmware configuration, and no interrupt translation service. The
//! interrupt controller itself can be made to write memory too, where it has LPIs; then nothing is
//! started.

use alloc::string::String;
use alloc::vec::Vec;
use core::ops::Range;

use dtoolkit::fdt::Fdt;
use dtoolkit::model::{DeviceTree, DeviceTreeNode, DeviceTreeProperty};
use dtoolkit::standard::NodeStandard;
use dtoolkit::{Node, Property, ToCellInt};
use tablewright::{Ipa, Pa, Span};
use tablewright_hypervisor_common::host::Reason;
use tablewright_hypervisor_common::pieces::Pieces;

/// Nodes that the guest may have, by what each is compatible with.
const KEPT: [&str; 8] = [
    "arm,pl011",
    "arm,pl031",
    "arm,gic-v3",
    "arm,armv8-timer",
    "arm,armv8-pmuv3",
    "arm,psci-0.2",
    "arm,psci",
    "fixed-clock",
];

/// Nodes that one of several guests may have: the rest is not emulated.
const EMULATED: [&str; 6] =
    ["arm,pl011", "arm,gic-v3", "arm,armv8-timer", "arm,psci-0.2", "arm,psci", "fixed-clock"];

const BLOCK: u64 = 2 << 20;

/// The contents of the tree.
pub struct Tree {
    /// All memory.
    pub ram: Span<Pa>,
    /// The UART, for the hypervisor's last words.
    pub uart: Pa,
    /// The distributor of the interrupt controller.
    pub distributor: u64,
    /// The redistributors of the interrupt controller, one for each processor.
    pub redistributors: Range<u64>,
    /// The affinities of all processors, in order.
    pub cpus: Vec<u64>,
    /// Registers that the guest gets, without the redistributors.
    pub devices: Vec<Range<u64>>,
    /// The address of the guest's kernel.
    pub kernel: Range<u64>,
    /// The address of its initial file system.
    pub initrd: Option<Range<u64>>,
    /// The hypervisor's own command line.
    pub arguments: String,
    model: DeviceTree,
}

/// The ranges of `reg`, in the cells of the parent.
fn ranges(node: &DeviceTreeNode, parent: &DeviceTreeNode) -> Vec<Range<u64>> {
    let cells = parent.address_space();
    let fields = [cells.address_cells as usize, cells.size_cells as usize];
    let Some(reg) = node.property("reg") else {
        return Vec::new();
    };
    let Ok(entries) = reg.as_prop_encoded_array(fields) else {
        return Vec::new();
    };
    let range = |[address, size]: [dtoolkit::Cells<'_>; 2]| {
        let (address, size): (u64, u64) = (address.to_int().ok()?, size.to_int().ok()?);
        Some(address..address.checked_add(size)?)
    };
    entries.filter_map(range).collect()
}

fn is_any(node: &DeviceTreeNode, kinds: &[&str]) -> bool {
    kinds.iter().any(|kind| node.is_compatible(kind))
}

fn text(node: &DeviceTreeNode, property: &str) -> String {
    let property = node.property(property);
    property
        .and_then(|property| property.value_as::<&str>().ok().map(String::from))
        .unwrap_or_default()
}

/// A node without its children.
fn alone(node: &DeviceTreeNode) -> DeviceTreeNode {
    let mut alone = DeviceTreeNode::new_unchecked(node.name());
    for property in node.properties() {
        alone.add_property(property.clone());
    }
    alone
}

impl Tree {
    /// Reads the tree that the loader has left.
    ///
    /// # Errors
    /// What is missing in it.
    pub fn read(fdt: &Fdt<'_>) -> Result<Self, Reason> {
        let model = DeviceTree::from_fdt(fdt);
        let root = &model.root;
        let memory: Vec<_> =
            root.children().filter(|node| text(node, "device_type") == "memory").collect();
        let [memory] = memory[..] else {
            return Err("there is not one memory node");
        };
        let [ram] = &ranges(memory, root)[..] else {
            return Err("memory is not in one piece");
        };
        let ram = Span::new(Pa::new(ram.start), ram.end - ram.start)
            .map_err(|_| "memory is not in whole pages")?;
        let registers = |kind, number| {
            let node = root.children().find(|node| node.is_compatible(kind))?;
            ranges(node, root).get(number).cloned()
        };
        let uart = registers("arm,pl011", 0).ok_or("there is no PL011")?;
        let redistributors = registers("arm,gic-v3", 1).ok_or("there is no GICv3")?;
        let distributor = registers("arm,gic-v3", 0).ok_or("there is no GICv3")?;
        let cpus = root.child("cpus").ok_or("there are no processors")?;
        let affinity = |cpu: &DeviceTreeNode| {
            let cells = cpus.address_cells().ok()? as usize;
            let reg = cpu.property("reg")?;
            let [id] = reg.as_prop_encoded_array([cells]).ok()?.next()?;
            id.to_int().ok()
        };
        let chosen = root.child("chosen").ok_or("there is no /chosen")?;
        let module = |kind| {
            let node = chosen.children().find(|node| node.is_compatible(kind))?;
            // The loader writes them in the cells of the root.
            ranges(node, root).first().cloned()
        };
        let devices =
            root.children().filter(|node| is_any(node, &KEPT)).flat_map(|node| ranges(node, root));
        let devices = devices.filter(|range| *range != redistributors).collect();
        Ok(Self {
            ram,
            uart: Pa::new(uart.start),
            distributor: distributor.start,
            redistributors,
            cpus: cpus
                .children()
                .filter(|cpu| text(cpu, "device_type") == "cpu")
                .filter_map(affinity)
                .collect(),
            devices,
            kernel: module("multiboot,kernel").ok_or("no kernel was loaded")?,
            initrd: module("multiboot,ramdisk"),
            arguments: text(chosen, "bootargs"),
            model,
        })
    }

    /// The memory that is the guest's: all from its kernel on. What lies below is the hypervisor's.
    ///
    /// # Errors
    /// The kernel does not begin with a block.
    pub fn guest(&self) -> Result<Span<Ipa>, Reason> {
        let first = Pa::new(self.kernel.start);
        if !first.is_aligned(BLOCK.trailing_zeros()) || !self.ram.contains(first) {
            return Err("the kernel was not loaded to a multiple of 2 MiB in memory");
        }
        Span::inclusive(Ipa::new(first.get()), Ipa::new(self.ram.last().get()))
            .map_err(|_| "no memory for the guest")
    }

    /// The tree for the guest with so many processors, and where it goes: behind everything that
    /// was loaded.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn for_guest(&self, pieces: &Pieces, cpus: usize) -> Result<(Vec<u8>, Pa), Reason> {
        self.of(pieces, cpus, &KEPT, None)
    }

    /// Reads the tree for one of several guests, with this memory: `guest=` its number, in its
    /// kernel's command line, and with those devices alone that are emulated. The address is the
    /// guest's own.
    ///
    /// # Errors
    /// There is no room for it.
    pub fn for_one_of(
        &self,
        memory: Span<Ipa>,
        cpus: usize,
        number: usize,
    ) -> Result<(Vec<u8>, Pa), Reason> {
        self.of(&memory.into(), cpus, &EMULATED, Some(number))
    }

    fn of(
        &self,
        guest: &Pieces,
        cpus: usize,
        kept: &[&str],
        number: Option<usize>,
    ) -> Result<(Vec<u8>, Pa), Reason> {
        let root = &self.model.root;
        let mut given = DeviceTree::new();
        for property in root.properties() {
            given.root.add_property(property.clone());
        }
        let add = |node: &mut DeviceTreeNode, name, value: &[u8]| {
            node.add_property(DeviceTreeProperty::new_unchecked(name, value));
        };
        for node in root.children() {
            match node.name() {
                "cpus" => {
                    let mut given_cpus = alone(node);
                    let is_cpu = |node: &&DeviceTreeNode| text(node, "device_type") == "cpu";
                    for cpu in node.children().filter(is_cpu).take(cpus) {
                        given_cpus.add_child(cpu.clone());
                    }
                    given.root.add_child(given_cpus);
                }
                "chosen" => {
                    let mut chosen = DeviceTreeNode::new_unchecked("chosen");
                    for name in ["stdout-path", "kaslr-seed", "rng-seed"] {
                        if let Some(property) = node.property(name) {
                            chosen.add_property(property.clone());
                        }
                    }
                    let kernel =
                        node.children().find(|node| node.is_compatible("multiboot,kernel"));
                    if let Some(arguments) = kernel.and_then(|kernel| kernel.property("bootargs")) {
                        let mut text = arguments.value().to_vec();
                        if let Some(number) = number {
                            // In front of the end of the text.
                            text.pop();
                            text.extend(alloc::format!(" guest={number}\0").bytes());
                        }
                        add(&mut chosen, "bootargs", &text);
                    }
                    if let Some(initrd) = &self.initrd {
                        add(&mut chosen, "linux,initrd-start", &initrd.start.to_be_bytes());
                        add(&mut chosen, "linux,initrd-end", &initrd.end.to_be_bytes());
                    }
                    given.root.add_child(chosen);
                }
                _ if text(node, "device_type") == "memory" => {
                    let mut memory = DeviceTreeNode::new_unchecked(alloc::format!(
                        "memory@{:x}",
                        guest.start().get()
                    ));
                    add(&mut memory, "device_type", b"memory\0");
                    let cells = |(_, piece): (u64, Span<Ipa>)| {
                        [piece.start().get().to_be_bytes(), piece.size().to_be_bytes()].concat()
                    };
                    let reg: Vec<u8> = guest.iter().flat_map(cells).collect();
                    add(&mut memory, "reg", &reg);
                    given.root.add_child(memory);
                }
                // Without its children: they are translation services.
                _ if is_any(node, kept) => given.root.add_child(alone(node)),
                _ => {}
            }
        }
        let blob = given.to_dtb();
        // A kernel takes more memory than its file has, for which the loader has left room before
        // the initial file system.
        let initrd = self.initrd.as_ref().ok_or("no initial file system was loaded")?;
        let at = Pa::new(self.kernel.end.max(initrd.end).next_multiple_of(BLOCK));
        // What was loaded is in the first piece.
        let first = guest.iter().next();
        let fits = Span::new(at, BLOCK).is_ok_and(|room| {
            first.is_some_and(|(_, piece)| piece.contains(Ipa::new(room.last().get())))
        });
        if !fits || blob.len() as u64 > BLOCK {
            return Err("there is no room for the guest's device tree");
        }
        Ok((blob, at))
    }
}
