export class Inside { constructor(root){this.root=root} show(){} hide(){} retry(){} open(){} }
